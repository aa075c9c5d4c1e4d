"""What the sampling kernels draw by: scaled logits, and their masses in fixed point.

A scaled logit is ``s = (x − peak) / temperature``, at most 0, and its mass is ``exp(s)`` as a whole number, 2⁴² for the peak
itself. Whole numbers have one sum, whatever the order in which they are added.
"""

from __future__ import annotations

import triton
import triton.language as tl

from refimpl.kernels import reference

GREEDY_BELOW = tl.constexpr(reference.GREEDY_BELOW)
MASS_ONE = tl.constexpr(2.0**42)
"""The mass of a row's peak; 2²⁰ such masses fit into 62 bits."""
LOWEST = tl.constexpr(-29.0)
"""Scaled logits under it have no mass: exp(−29) · 2⁴² = 1.1."""


@triton.jit
def largest(value: tl.tensor) -> tl.tensor:
    """The largest of a tile; NaN if any is NaN or +inf."""
    bad = (value != value) | (value == float("inf"))
    peak = tl.max(tl.where(bad, float("-inf"), value), axis=0)
    return tl.where(tl.max(bad.to(tl.int32), axis=0) > 0, float("nan"), peak)


@triton.jit
def is_usable(peak: tl.tensor) -> tl.tensor:
    """Whether a row's largest logit is a finite number."""
    return tl.abs(peak) < float("inf")


@triton.jit
def below(value: tl.tensor, peak: tl.tensor) -> tl.tensor:
    """How far values lie from their peak; −inf where the peak itself is."""
    return value - tl.where(peak == float("-inf"), 0.0, peak)


@triton.jit
def scaled(value: tl.tensor, peak: tl.tensor, heat: tl.tensor) -> tl.tensor:
    """``(value − peak) / temperature``, rounded as torch rounds; of use where the temperature is not that of greedy rows."""
    return tl.div_rn(below(value, peak), tl.maximum(heat, GREEDY_BELOW))


@triton.jit
def fixed_point(s: tl.tensor) -> tl.tensor:
    """Masses of scaled logits, as integers; 0 for NaN, which comes of rows that are refused."""
    mass = tl.exp(s) * MASS_ONE
    return tl.where(s >= LOWEST, mass, 0.0).to(tl.int64)


@triton.jit
def is_kept(s: tl.tensor, token: tl.tensor, cut: tl.tensor, cut_id: tl.tensor) -> tl.tensor:
    """Which tokens are on the kept side of a cut."""
    return (s > cut) | ((s == cut) & (token <= cut_id))
