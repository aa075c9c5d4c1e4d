"""Masses of single tokens and of their row, from what :func:`refimpl.kernels.sampling.row_statistics` found of it."""

from __future__ import annotations

import triton
import triton.language as tl

from refimpl.kernels.sampling_cut import row_peak
from refimpl.kernels.sampling_mass import GREEDY_BELOW, fixed_point, is_kept, scaled


@triton.jit
def law(
    logits: tl.tensor,
    stride: tl.tensor,
    row: tl.tensor,
    token: tl.tensor,
    heat: tl.tensor,
    peaks: tl.tensor,
    masses: tl.tensor,
    cuts: tl.tensor,
    cut_ids: tl.tensor,
    V: tl.tensor,
    num_tiles: tl.tensor,
    FILTERED: tl.constexpr,
    TILES: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """The mass of one token or a tile of tokens, 0 beyond the vocabulary, and the row's, NaN if it has no finite peak.

    Both in float64, relative to the row's peak; their quotient is the token's probability.
    """
    peak = row_peak(peaks, row, num_tiles, TILES)
    cut, cut_id = tl.full((), float("-inf"), tl.float32), V
    if FILTERED:
        cut, cut_id = tl.load(cuts + row), tl.load(cut_ids + row)
    total = _row_mass(peaks, masses, row, peak, heat, cut, num_tiles, TILES)
    s = scaled(tl.load(logits + row * stride + token, mask=token < V, other=float("-inf")).to(tl.float32), peak, heat)
    return tl.where(is_kept(s, token, cut, cut_id), fixed_point(s), 0).to(tl.float64), total


@triton.jit
def _row_mass(
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
