"""The probabilities of single tokens of a row, from what :func:`refimpl.kernels.sampling.row_statistics` found of it."""

from __future__ import annotations

import triton
import triton.language as tl

from refimpl.kernels.sampling_mass import GREEDY_BELOW, fixed_point, is_kept, scaled


@triton.jit
def cut_of(cuts: tl.tensor, cut_ids: tl.tensor, row: tl.tensor, V: tl.tensor, FILTERED: tl.constexpr) -> tl.tensor:
    """The cut of a row; (−inf, V) for none."""
    cut, cut_id = tl.full((), float("-inf"), tl.float32), V
    if FILTERED:
        cut, cut_id = tl.load(cuts + row), tl.load(cut_ids + row)
    return cut, cut_id


@triton.jit
def row_mass(
    peaks: tl.tensor,
    masses: tl.tensor,
    row: tl.tensor,
    peak: tl.tensor,
    heat: tl.tensor,
    cut: tl.tensor,
    num_tiles: tl.tensor,
    TILES: tl.constexpr,
) -> tl.tensor:
    """The mass of a row, in float64, where that of its peak is 2⁴²."""
    tiles = tl.arange(0, TILES)
    there = tiles < num_tiles
    peak_of = tl.load(peaks + row * num_tiles + tiles, mask=there, other=float("-inf"))  # [TILES]
    if cut > float("-inf"):  # masses of what a filter keeps are relative to the row's peak
        peak_of = tl.where(there, peak, float("-inf"))
    mass_of = tl.load(masses + row * num_tiles + tiles, mask=there, other=0).to(tl.float64)
    return tl.sum(mass_of * tl.exp((peak_of.to(tl.float64) - peak) / tl.maximum(heat, GREEDY_BELOW)), axis=0)


@triton.jit
def probability(
    row_logits: tl.tensor,
    token: tl.tensor,
    peak: tl.tensor,
    heat: tl.tensor,
    mass: tl.tensor,
    cut: tl.tensor,
    cut_id: tl.tensor,
    V: tl.tensor,
) -> tl.tensor:
    """Probabilities of tokens, in float64; 0 beyond the vocabulary."""
    s = scaled(tl.load(row_logits + token, mask=token < V, other=float("-inf")).to(tl.float32), peak, heat)
    return tl.where(is_kept(s, token, cut, cut_id), fixed_point(s), 0).to(tl.float64) / mass
