"""One token a row of logits, by one uniform number and the inverse of the cumulative distribution.

The law is :func:`reference.sample`. On the way every logit is read once, and one tile of each row a second time::

    logits [R, V] ─ tile_statistics, program (row, tile) ─► peaks, their ids, masses [R, tiles]
                                                                   │   rows with min_p, top_k, top_p: sampling_cut finds the
                                                                   │   least kept value, and masses of what is kept
                                                                   ▼
    draw, program (row):    greedy    the id of the highest peak
                            random    u · total falls into one tile; its tokens' cumulative masses say which

A mass is ``exp((x − peak) / temperature)`` in fixed point, 2⁴² for the peak itself, so that sums are exact: they do
not depend on the order of addition, on the extent of tiles, on the batch or on the device, and the token drawn depends on
them only through the exponential's last bits. Peaks are those of tiles, so that masses need no second pass; float64 brings
the few tiles of a row to one scale. What weighs less than 2⁻⁴² of the peak weighs nothing.

The uniform number is Philox4x32-10 of (seed, path, position, purpose) (Salmon et al. 2011), as in
:mod:`refimpl.kernels.philox`; no state is kept. The token's log-probability is that of the raw logits. Bound by memory: 4·V
bytes a row (2·V for logits of 16 bits), twice that where ``raw`` differs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from refimpl.kernels import reference
from refimpl.kernels.launch import check_last_axis, check_same, device_of, power_of_two
from refimpl.kernels.sampling_cut import PART, PASS, PIVOTS, cut_kernel, shorten_kernel, survey_kernel
from refimpl.kernels.sampling_mass import GREEDY_BELOW, below, fixed_point, is_kept, is_usable, largest, scaled

TILE = 4096
"""Tokens of a tile. It may be tuned: masses are exact, so no token depends on it."""
NUM_WARPS = 8
OPTIONS = {"num_warps": NUM_WARPS, "enable_fp_fusion": False}
BAD_LOGITS = tl.constexpr(reference.BAD_LOGITS)
NOTHING_LEFT = tl.constexpr(reference.NOTHING_LEFT)


@triton.jit
def tile_statistics_kernel(
    logits: tl.tensor,
    raw: tl.tensor,
    temperature: tl.tensor,
    peaks: tl.tensor,
    peak_ids: tl.tensor,
    masses: tl.tensor,
    raw_peaks: tl.tensor,
    raw_masses: tl.tensor,
    logits_stride: tl.tensor,
    raw_stride: tl.tensor,
    V: tl.tensor,
    ADJUSTED: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """What tile ``program_id(1)`` of row ``program_id(0)`` holds; ``raw`` is read where logits are ``ADJUSTED`` ones."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = tile * TILE + tl.arange(0, TILE)
    place = row * tl.num_programs(1) + tile
    value = tl.load(logits + row * logits_stride + token, mask=token < V, other=float("-inf")).to(tl.float32)  # [TILE]
    peak = largest(value)
    tl.store(peaks + place, peak)
    tl.store(peak_ids + place, tl.min(tl.where(value == peak, token, V), axis=0))
    heat = tl.load(temperature + row)
    tl.store(masses + place, tl.sum(fixed_point(scaled(value, peak, heat)), axis=0))
    if ADJUSTED:
        value = tl.load(raw + row * raw_stride + token, mask=token < V, other=float("-inf")).to(tl.float32)  # [TILE]
        peak = largest(value)
    tl.store(raw_peaks + place, peak)
    tl.store(raw_masses + place, tl.sum(tl.exp(below(value, peak)), axis=0))


@triton.jit
def uniform(seed: tl.tensor, path: tl.tensor, position: tl.tensor, purpose: tl.tensor) -> tl.tensor:
    """The number of :func:`refimpl.kernels.philox.uniform`, in float64, strictly between 0 and 1."""
    word, _, _, _ = tl.philox(seed, position.to(tl.int32), purpose, path.to(tl.int32), (path >> 32).to(tl.int32))
    return (word.to(tl.float64) + 0.5) * (1.0 / 4294967296.0)


@triton.jit
def _draw_random(
    row_logits: tl.tensor,
    peak: tl.tensor,
    tile_peaks: tl.tensor,
    masses: tl.tensor,
    heat: tl.tensor,
    u: tl.tensor,
    cut: tl.tensor,
    cut_id: tl.tensor,
    V: tl.tensor,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:
    """The first token whose cumulative mass exceeds ``u`` times the total. ``tile_peaks`` and ``masses`` are [TILES]."""
    tiles = tl.arange(0, TILES)
    factor = tl.exp((tile_peaks.to(tl.float64) - peak) / heat)  # brings a tile's masses to the row's scale
    cumulative = tl.cumsum(masses.to(tl.float64) * factor, axis=0)  # [TILES]
    threshold = u * tl.max(cumulative, axis=0)
    tile = tl.sum((cumulative <= threshold).to(tl.int32), axis=0)
    remaining = threshold - tl.max(tl.where(tiles < tile, cumulative, 0.0), axis=0)
    tile_peak = tl.max(tl.where(tiles == tile, tile_peaks, float("-inf")), axis=0)
    tile_factor = tl.max(tl.where(tiles == tile, factor, 0.0), axis=0)

    token = tile * TILE + tl.arange(0, TILE)
    value = tl.load(row_logits + token, mask=token < V, other=float("-inf")).to(tl.float32)  # [TILE]
    kept = is_kept(scaled(value, peak, heat), token, cut, cut_id)
    mass = tl.where(kept, fixed_point(scaled(value, tile_peak, heat)), 0)
    passed = (tl.cumsum(mass, axis=0).to(tl.float64) * tile_factor > remaining) & (mass > 0)
    first = tl.min(tl.where(passed, token, V), axis=0)
    # Rounding may leave the threshold a hair beyond the tile's last token.
    return tl.where(first < V, first, tl.max(tl.where(mass > 0, token, 0), axis=0))


@triton.jit
def draw_kernel(
    logits: tl.tensor,
    raw: tl.tensor,
    temperature: tl.tensor,
    seed: tl.tensor,
    path: tl.tensor,
    position: tl.tensor,
    cuts: tl.tensor,
    cut_ids: tl.tensor,
    peaks: tl.tensor,
    peak_ids: tl.tensor,
    masses: tl.tensor,
    raw_peaks: tl.tensor,
    raw_masses: tl.tensor,
    token_ids: tl.tensor,
    logprobs: tl.tensor,
    logits_stride: tl.tensor,
    raw_stride: tl.tensor,
    V: tl.tensor,
    num_tiles: tl.tensor,
    purpose: tl.tensor,
    FILTERED: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Row ``program_id(0)``: its token and the token's log-probability."""
    row = tl.program_id(0).to(tl.int64)
    tiles = tl.arange(0, TILES)
    place, there = row * num_tiles + tiles, tiles < num_tiles
    raw_peak_of = tl.load(raw_peaks + place, mask=there, other=float("-inf"))  # [TILES]
    raw_mass_of = tl.load(raw_masses + place, mask=there, other=0.0)  # [TILES]
    peak_of = tl.load(peaks + place, mask=there, other=float("-inf"))  # [TILES]
    raw_peak, peak = largest(raw_peak_of), largest(peak_of)
    token = tl.min(tl.where(peak_of == peak, tl.load(peak_ids + place, mask=there, other=0), V), axis=0)

    heat = tl.load(temperature + row)
    if is_usable(raw_peak) & is_usable(peak):
        if heat >= GREEDY_BELOW:
            u = uniform(tl.load(seed + row), tl.load(path + row), tl.load(position + row), purpose)
            cut, cut_id = float("-inf"), V
            if FILTERED:
                cut, cut_id = tl.load(cuts + row), tl.load(cut_ids + row)
                # Masses of what a filter keeps are relative to the row's peak.
                if cut > float("-inf"):
                    peak_of = tl.where(there, peak, float("-inf"))
            mass_of = tl.load(masses + place, mask=there, other=0)  # [TILES]
            start = logits + row * logits_stride
            token = _draw_random(start, peak, peak_of, mass_of, heat, u, cut, cut_id, V, TILES, TILE)
        log_total = tl.log(tl.sum(raw_mass_of * tl.exp(below(raw_peak_of, raw_peak)), axis=0))
        logprob = tl.load(raw + row * raw_stride + token).to(tl.float32) - raw_peak - log_total
    else:
        token = tl.where(is_usable(raw_peak), NOTHING_LEFT, BAD_LOGITS)
        logprob = raw_peak * float("nan")
    tl.store(token_ids + row, token.to(tl.int64))
    tl.store(logprobs + row, logprob)


def sample(
    logits: Tensor,
    temperature: Tensor,
    seed: Tensor,
    path: Tensor,
    position: Tensor,
    purpose: int,
    raw: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    token_ids: Tensor | None = None,
    logprobs: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """:func:`reference.sample`: a token a row of ``logits [R, V]``, and its log-probability by ``raw`` (else ``logits``).

    Parameters are ``[R]``: temperature, top_p, min_p in float32, the others in int64; filters are given all or none. Results
    are written to ``token_ids`` (int64) and ``logprobs`` (float32) if they are given.

    Raises:
        RefimplError: elements of a row lie apart, or sizes differ.

    """
    raw_or_logits = logits if raw is None else raw
    check_last_axis(logits=logits, raw=raw_or_logits)
    check_same("sizes", logits=logits.shape, raw=raw_or_logits.shape)
    token_ids = torch.empty_like(seed) if token_ids is None else token_ids
    logprobs = torch.empty_like(temperature) if logprobs is None else logprobs
    if len(logits):
        found = row_statistics(logits, raw_or_logits, temperature, top_k, top_p, min_p)
        draw_rows(logits, raw_or_logits, (temperature, seed, path, position), found, (token_ids, logprobs), purpose)
    return token_ids, logprobs


@dataclass(frozen=True)
class RowStatistics:
    """What is known of rows of logits once each was read: of their tiles ``[R, tiles]``, and where filters cut ``[R]``."""

    peaks: Tensor
    peak_ids: Tensor
    masses: Tensor
    """Relative to the tile's peak; where a row is cut, what the filters keep, relative to the row's peak."""
    raw_peaks: Tensor
    raw_masses: Tensor
    cuts: Tensor
    cut_ids: Tensor
    filtered: bool
    """Whether there are cuts at all."""


def row_statistics(
    logits: Tensor, raw: Tensor, temperature: Tensor, top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None
) -> RowStatistics:
    """Of one row at least, with the parameters of :func:`sample`; ``raw`` may be the logits themselves."""
    (R, V), num_tiles = logits.shape, triton.cdiv(logits.shape[1], TILE)
    peaks, raw_peaks, raw_masses = logits.new_empty(3, R, num_tiles, dtype=torch.float32)
    peak_ids = torch.empty_like(peaks, dtype=torch.int32)
    masses = torch.empty_like(peaks, dtype=torch.int64)
    cuts, cut_ids = torch.empty_like(temperature), torch.empty_like(temperature, dtype=torch.int32)
    with device_of(logits):
        tile_statistics_kernel[(R, num_tiles)](
            logits, raw, temperature, peaks, peak_ids, masses, raw_peaks, raw_masses, logits.stride(0), raw.stride(0), V,
            ADJUSTED=raw is not logits, TILE=TILE, **OPTIONS,
        )  # fmt: skip
        if top_k is not None:
            _cut(logits, (temperature, top_k, top_p, min_p), peaks, (cuts, cut_ids, masses))
    return RowStatistics(peaks, peak_ids, masses, raw_peaks, raw_masses, cuts, cut_ids, filtered=top_k is not None)


def draw_rows(
    logits: Tensor,
    raw: Tensor,
    parameters: tuple[Tensor, Tensor, Tensor, Tensor],
    found: RowStatistics,
    results: tuple[Tensor, Tensor],
    purpose: int,
) -> None:
    """Write each row's token and its log-probability; ``parameters`` are temperature, seed, path and position."""
    (R, V), num_tiles = logits.shape, found.peaks.shape[1]
    statistics = (found.peaks, found.peak_ids, found.masses, found.raw_peaks, found.raw_masses)
    with device_of(logits):
        draw_kernel[(R,)](
            logits, raw, *parameters, found.cuts, found.cut_ids, *statistics, *results, logits.stride(0), raw.stride(0), V,
            num_tiles, purpose, FILTERED=found.filtered, TILES=power_of_two(num_tiles), TILE=TILE, **OPTIONS,
        )  # fmt: skip


def _cut(
    logits: Tensor,
    parameters: tuple[Tensor, Tensor | None, Tensor | None, Tensor | None],
    peaks: Tensor,
    results: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Find the cuts of all rows: temperature, top_k, top_p and min_p in, the cuts, their ids and the masses kept out."""
    (R, V), num_tiles = logits.shape, peaks.shape[1]
    num_parts = triton.cdiv(V, PART)
    counts = torch.empty(R, num_parts, PIVOTS, dtype=torch.int32, device=logits.device)
    amounts = torch.empty(R, num_parts, PIVOTS, dtype=torch.int64, device=logits.device)
    shorts = torch.empty(R, V, dtype=torch.float32, device=logits.device)
    short_ids = torch.empty(R, V, dtype=torch.int32, device=logits.device)
    tiles, parts = {"TILES": power_of_two(num_tiles), "PIVOTS": PIVOTS} | OPTIONS, {"PARTS": power_of_two(num_parts)}
    survey_kernel[(R, num_parts)](
        logits, *parameters, peaks, counts, amounts, logits.stride(0), V, num_tiles, PART=PART, **tiles
    )  # fmt: skip
    shorten_kernel[(R, num_parts)](
        logits, *parameters, peaks, counts, amounts, shorts, short_ids, logits.stride(0), V, num_tiles,
        PART=PART, **parts, **tiles,
    )  # fmt: skip
    cut_kernel[(R,)](
        *parameters, peaks, counts, amounts, shorts, short_ids, *results, V, num_tiles, num_parts,
        TILE=TILE, PASS=PASS, **parts, **tiles,
    )  # fmt: skip
