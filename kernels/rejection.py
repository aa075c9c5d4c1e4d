"""The check of drafted tokens, for all sequences of a step, without a word from the host.

The law is :func:`rejection_reference.verify`. Logits of target and draft are read once for their statistics, as in
:mod:`refimpl.kernels.sampling`, and the one row of each in which a draft is rejected twice more::

    target [R, V] ─ sample ──► a token of its own for each row, peaks, masses, cuts       (sampling.py, sampling_cut.py)
    draft [S, K, V] ─ statistics, cuts ──► peaks, masses, cuts

    accept     (sequence)         u < p(x)/q(x), draft by draft, up to the first that fails; the round's tokens, the last one
                                  the target's own
    residual   (sequence, tile)   after a rejection: Σ (p − q)⁺ over a tile
    redraw     (sequence)         u · total falls into one tile; its tokens' cumulative residual says which; written over
                                  the target's own token

p(x) is x's mass over the row's, in float64, made the same way on both sides: equal logits give equal laws, so a draft that
is the target is accepted always. (p − q)⁺ is kept in fixed point, 2⁶⁰ for 1, so that sums do not depend on their order. In
greedy rows, after full acceptance, for a draft that is none, and where rounding leaves nothing of p − q, the target's own
token stands, and so do its failures. Bound by memory: V logits a row of either side.

Sources: Leviathan et al. 2023, Chen et al. 2023 (the law).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from refimpl.kernels import rejection_reference
from refimpl.kernels.launch import check_last_axis, check_same, device_of, power_of_two
from refimpl.kernels.philox import Purpose
from refimpl.kernels.rejection_law import law
from refimpl.kernels.sampling import OPTIONS, TILE, RowStatistics, draw_rows, row_statistics, uniform
from refimpl.kernels.sampling_mass import GREEDY_BELOW

NO_TOKEN = tl.constexpr(rejection_reference.NO_TOKEN)
ACCEPT_WARPS = 1
"""That program looks at one token at a time, and at the masses of tiles, of which there are a few tens."""
WHOLE = tl.constexpr(2.0**60)
"""The probability 1 as a fixed-point number."""


@triton.jit
def accept_kernel(
    target: tl.tensor,
    draft: tl.tensor,
    draft_ids: tl.tensor,
    rows: tl.tensor,
    num_drafts: tl.tensor,
    own_ids: tl.tensor,
    temperature: tl.tensor,
    seed: tl.tensor,
    path: tl.tensor,
    position: tl.tensor,
    peaks: tl.tensor,
    masses: tl.tensor,
    cuts: tl.tensor,
    cut_ids: tl.tensor,
    draft_peaks: tl.tensor,
    draft_masses: tl.tensor,
    draft_cuts: tl.tensor,
    draft_cut_ids: tl.tensor,
    token_ids: tl.tensor,
    num_accepted: tl.tensor,
    rejected: tl.tensor,
    target_stride: tl.tensor,
    draft_stride: tl.tensor,
    V: tl.tensor,
    num_tiles: tl.tensor,
    K: tl.tensor,
    purpose: tl.tensor,
    FILTERED: tl.constexpr,
    TILES: tl.constexpr,
) -> None:
    """The accepted drafts of sequence ``program_id(0)``, the target's own token behind them; whether one was rejected."""
    s = tl.program_id(0).to(tl.int64)
    own_drafts = tl.load(num_drafts + s)
    accepted, going, rejects = own_drafts * 0, own_drafts == own_drafts, own_drafts != own_drafts
    for i in range(K):
        row, draft_row = tl.load(rows + s * (K + 1) + i), s * K + i
        x, own = tl.load(draft_ids + draft_row), tl.load(own_ids + row)
        is_draft = going & (i < own_drafts) & (x >= 0) & (x < V) & (own >= 0)
        going = is_draft & (x == own)  # in a greedy row
        heat = tl.load(temperature + row)
        if is_draft & (heat >= GREEDY_BELOW):
            p, p_total = law(
                target, target_stride, row, x, heat, peaks, masses, cuts, cut_ids, V, num_tiles, FILTERED, TILES
            )
            q, q_total = law(
                draft, draft_stride, draft_row, x, heat, draft_peaks, draft_masses, draft_cuts, draft_cut_ids, V, num_tiles,
                FILTERED, TILES,
            )  # fmt: skip
            u = uniform(tl.load(seed + row), tl.load(path + row), tl.load(position + row), purpose)
            going = u * q * p_total < p * q_total
            rejects = u * q * p_total >= p * q_total  # NaN, of a draft of no distribution, is neither
        accepted += going.to(tl.int64)
    for i in range(K + 1):
        place = s * (K + 1) + i
        x = tl.load(draft_ids + s * K + i, mask=i < K, other=0)
        last = tl.where(i == accepted, tl.load(own_ids + tl.load(rows + place)), NO_TOKEN)
        tl.store(token_ids + place, tl.where(i < accepted, x, last))
    tl.store(num_accepted + s, accepted)
    tl.store(rejected + s, rejects.to(tl.int32))


@triton.jit
def _residual(
    target: tl.tensor,
    draft: tl.tensor,
    temperature: tl.tensor,
    peaks: tl.tensor,
    masses: tl.tensor,
    cuts: tl.tensor,
    cut_ids: tl.tensor,
    draft_peaks: tl.tensor,
    draft_masses: tl.tensor,
    draft_cuts: tl.tensor,
    draft_cut_ids: tl.tensor,
    target_stride: tl.tensor,
    draft_stride: tl.tensor,
    V: tl.tensor,
    num_tiles: tl.tensor,
    row: tl.tensor,
    draft_row: tl.tensor,
    tile: tl.tensor,
    FILTERED: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:
    """``(p − q)⁺`` of the tokens of a tile, in fixed point. [TILE]."""
    token = tile * TILE + tl.arange(0, TILE)
    heat = tl.load(temperature + row)
    p, p_total = law(target, target_stride, row, token, heat, peaks, masses, cuts, cut_ids, V, num_tiles, FILTERED, TILES)
    q, q_total = law(
        draft, draft_stride, draft_row, token, heat, draft_peaks, draft_masses, draft_cuts, draft_cut_ids, V, num_tiles,
        FILTERED, TILES,
    )  # fmt: skip
    return (tl.maximum(p * (1.0 / p_total) - q * (1.0 / q_total), 0.0) * WHOLE).to(tl.int64)


@triton.jit
def residual_kernel(
    target: tl.tensor,
    draft: tl.tensor,
    rows: tl.tensor,
    temperature: tl.tensor,
    peaks: tl.tensor,
    masses: tl.tensor,
    cuts: tl.tensor,
    cut_ids: tl.tensor,
    draft_peaks: tl.tensor,
    draft_masses: tl.tensor,
    draft_cuts: tl.tensor,
    draft_cut_ids: tl.tensor,
    num_accepted: tl.tensor,
    rejected: tl.tensor,
    residuals: tl.tensor,
    target_stride: tl.tensor,
    draft_stride: tl.tensor,
    V: tl.tensor,
    num_tiles: tl.tensor,
    K: tl.tensor,
    FILTERED: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """The residual of tile ``program_id(1)``, in the row where sequence ``program_id(0)`` had a draft rejected."""
    s, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if tl.load(rejected + s) > 0:
        place = tl.load(num_accepted + s)
        left = _residual(
            target, draft, temperature, peaks, masses, cuts, cut_ids, draft_peaks, draft_masses, draft_cuts,
            draft_cut_ids, target_stride, draft_stride, V, num_tiles, tl.load(rows + s * (K + 1) + place), s * K + place,
            tile, FILTERED, TILES, TILE,
        )  # fmt: skip
        tl.store(residuals + s * num_tiles + tile, tl.sum(left, axis=0))


@triton.jit
def redraw_kernel(
    target: tl.tensor,
    draft: tl.tensor,
    rows: tl.tensor,
    temperature: tl.tensor,
    peaks: tl.tensor,
    masses: tl.tensor,
    cuts: tl.tensor,
    cut_ids: tl.tensor,
    draft_peaks: tl.tensor,
    draft_masses: tl.tensor,
    draft_cuts: tl.tensor,
    draft_cut_ids: tl.tensor,
    num_accepted: tl.tensor,
    rejected: tl.tensor,
    residuals: tl.tensor,
    seed: tl.tensor,
    path: tl.tensor,
    position: tl.tensor,
    token_ids: tl.tensor,
    target_stride: tl.tensor,
    draft_stride: tl.tensor,
    V: tl.tensor,
    num_tiles: tl.tensor,
    K: tl.tensor,
    purpose: tl.tensor,
    FILTERED: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """In place of the rejected token of sequence ``program_id(0)`` the first whose cumulative residual exceeds u · total."""
    s, tiles = tl.program_id(0).to(tl.int64), tl.arange(0, TILES)
    if tl.load(rejected + s) > 0:
        place = tl.load(num_accepted + s)
        row = tl.load(rows + s * (K + 1) + place)
        cumulative = tl.cumsum(tl.load(residuals + s * num_tiles + tiles, mask=tiles < num_tiles, other=0), axis=0)
        total = tl.max(cumulative, axis=0)
        if total > 0:
            u = uniform(tl.load(seed + row), tl.load(path + row), tl.load(position + row), purpose)
            threshold = tl.minimum((u * total.to(tl.float64)).to(tl.int64), total - 1)
            tile = tl.sum((cumulative <= threshold).to(tl.int32), axis=0)
            left = _residual(
                target, draft, temperature, peaks, masses, cuts, cut_ids, draft_peaks, draft_masses, draft_cuts,
                draft_cut_ids, target_stride, draft_stride, V, num_tiles, row, s * K + place, tile,
                FILTERED, TILES, TILE,
            )  # fmt: skip
            before = tl.max(tl.where(tiles < tile, cumulative, 0), axis=0)
            passed = before + tl.cumsum(left, axis=0) > threshold
            token = tl.min(tl.where(passed, tile * TILE + tl.arange(0, TILE), V), axis=0)
            tl.store(token_ids + s * (K + 1) + place, token.to(tl.int64))


def verify(
    logits: Tensor,
    rows: Tensor,
    draft_ids: Tensor,
    draft_logits: Tensor,
    num_drafts: Tensor,
    temperature: Tensor,
    seed: Tensor,
    path: Tensor,
    position: Tensor,
    raw: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    token_ids: Tensor | None = None,
    num_accepted: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """:func:`rejection_reference.verify`; results are written to ``token_ids`` and ``num_accepted``, if they are given.

    Logits are ``[R, V]`` and contiguous ``[S, K, V]``, of the same dtype or not. Parameters are ``[R]``, with the dtypes of
    :func:`refimpl.kernels.sampling.sample`; ids, rows ``[S, K1]`` and numbers are int64.

    Raises:
        RefimplError: elements of a row lie apart, or sizes differ.

    """
    (S, K), (R, V) = draft_ids.shape, logits.shape
    raw = logits if raw is None else raw
    check_same("sizes", rows=tuple(rows.shape), draft_ids=(S, K + 1))
    check_same("rows", logits=R, raw=len(raw), temperature=len(temperature), seed=len(seed))
    check_last_axis(logits=logits, raw=raw)
    token_ids = draft_ids.new_empty(S, K + 1) if token_ids is None else token_ids
    num_accepted = torch.empty_like(num_drafts) if num_accepted is None else num_accepted
    if not S:
        return token_ids, num_accepted
    own_ids, logprobs = torch.empty_like(seed), torch.empty_like(temperature)
    found = row_statistics(logits, raw, temperature, top_k, top_p, min_p)
    draw_rows(logits, raw, (temperature, seed, path, position), found, (own_ids, logprobs), Purpose.TARGET)
    of_draft, draft = found, logits
    if K:
        draft, judges = draft_logits.view(S * K, V), rows[:, :K].flatten()
        filters = [None if one is None else one[judges] for one in (top_k, top_p, min_p)]
        of_draft = row_statistics(draft, draft, temperature[judges], *filters)
    _judge(
        (logits, draft, draft_ids, rows), num_drafts, own_ids, (temperature, seed, path, position), (found, of_draft),
        (token_ids, num_accepted),
    )  # fmt: skip
    return token_ids, num_accepted


def _judge(
    compared: tuple[Tensor, Tensor, Tensor, Tensor],
    num_drafts: Tensor,
    own_ids: Tensor,
    parameters: tuple[Tensor, Tensor, Tensor, Tensor],
    found: tuple[RowStatistics, RowStatistics],
    results: tuple[Tensor, Tensor],
) -> None:
    """Accept, and redraw: ``compared`` are the logits of target and draft, its tokens, and the rows that judge them."""
    target, draft, draft_ids, rows = compared
    (token_ids, num_accepted), (temperature, *numbers) = results, parameters
    (S, K), V, num_tiles = draft_ids.shape, target.shape[1], found[0].peaks.shape[1]
    rejected = torch.empty_like(num_drafts, dtype=torch.int32)
    residuals = torch.empty(S, num_tiles, dtype=torch.int64, device=target.device)
    statistics = [tensor for one in found for tensor in (one.peaks, one.masses, one.cuts, one.cut_ids)]
    sizes = (target.stride(0), draft.stride(0), V, num_tiles, K)
    constants = {"FILTERED": found[0].filtered, "TILES": power_of_two(num_tiles)}
    one_warp = OPTIONS | {"num_warps": ACCEPT_WARPS}
    with device_of(target):
        accept_kernel[(S,)](
            *compared, num_drafts, own_ids, *parameters, *statistics, token_ids, num_accepted, rejected, *sizes,
            Purpose.ACCEPT, **constants, **one_warp,
        )  # fmt: skip
        if K:
            shared = (target, draft, rows, temperature, *statistics, num_accepted, rejected, residuals)
            residual_kernel[(S, num_tiles)](*shared, *sizes, TILE=TILE, **constants, **OPTIONS)
            redraw_kernel[(S,)](*shared, *numbers, token_ids, *sizes, Purpose.TARGET, TILE=TILE, **constants, **OPTIONS)
