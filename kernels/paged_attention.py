"""Decode attention over the paged cache: up to 16 queries a sequence, split along the context.

A decode reads every key and value of its context once and does ``4 · D`` FLOPs a query head with each pair: with ``G`` query
heads a key/value head that is ``G`` FLOPs a byte in 16 bits, where a GPU has some 150 to spare. So the kernel is as fast as
memory, if enough is in flight, and all that matters is to read each key and value once, in parallel.

*Rows.* The ``G`` query heads of one key/value head, for each of the ``n`` queries, read the same keys: they are the rows of
one product, row r = query ``r // G``, head ``r % G`` of the group. Tensor cores want 16 rows; 4 of them full cost no more
than one. Row r sees the keys up to its query's position ``context − n + r // G``::

    query   [S, n, Hq, D]  ─ group ─►  [M, D]           M ≥ 16, held for the whole split
    k_cache [blocks, B, Hkv, D]  ─ table ─►  [N, D]     a tile: N keys by their pages, and the next ones on their way
    scores  [M, N] ─ running softmax ─►  attended [M, D], row_max [M], row_sum [M]   float32, in registers

*Splits* (Flash-Decoding; :mod:`refimpl.kernels.split_plan`). A split leaves its own softmax average ``o`` and the logarithm
of its denominator, ``lse = m + log₂ l``. Two such pairs merge into ``(w₁ o₁ + w₂ o₂) / (w₁ + w₂)``, where ``w = 2^lse``. The
second kernel does that for all splits of a sequence; a sequence of one split is written at once.

*Bytes*: ``2 · L · Hkv · D`` elements a sequence of K and V; queries and outputs beside it are ``2 · n · Hq · D``; each split
beyond the first writes and reads ``4 · n · Hq · (D + 1)`` bytes.

*T4 (sm_75)*: Triton has no tensor-core products for it. There, and for float32, products are vector arithmetic in float32,
with up to 4 rows a program, not 16 (``VECTOR``).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from refimpl.kernels.attention_tiles import (
    LOG2_E,
    Target,
    attend,
    check_inputs,
    first_whole_tile,
    load_rows,
    operand,
    padded,
    store_rows,
    target_of,
)
from refimpl.kernels.launch import device_of, power_of_two
from refimpl.kernels.overlap import after_previous, overlapping
from refimpl.kernels.split_plan import SplitPlan, plan_splits

MAX_QUERIES = 16
"""Queries a sequence that this kernel serves; more are a prefill (:mod:`refimpl.kernels.flash_attention`)."""
HEADS_AT_ONCE = 4
SPLITS_AT_ONCE = 32
"""Of a program that merges: 16,384 numbers in its registers at a head size of 128."""


@triton.jit
def whole_tiles(
    first: tl.tensor,
    end: tl.tensor,
    first_position: tl.tensor,
    queries: tl.tensor,
    TILE_N: tl.constexpr,
    WINDOW: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """From where to where all queries see a split's tiles whole."""
    seen_by_all = first + tl.maximum(tl.minimum(end, first_position + 1) - first, 0) // TILE_N * TILE_N
    whole = first
    if WINDOW:
        whole = tl.maximum(first, first_whole_tile(first_position + queries - 1, TILE_N, WINDOW))
        seen_by_all = tl.maximum(seen_by_all, whole)
    return whole, seen_by_all


@triton.jit(do_not_specialize=["table_stride"])
def decode_kernel(
    out: tl.tensor,
    split_out: tl.tensor,
    split_lse: tl.tensor,
    query: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    block_table: tl.tensor,
    cu_seqlens_q: tl.tensor,
    seqused_k: tl.tensor,
    items: tl.tensor,
    scale_log2: tl.tensor,
    token_stride: tl.tensor,
    query_head_stride: tl.tensor,
    table_stride: tl.tensor,
    block_stride: tl.tensor,
    slot_stride: tl.tensor,
    head_stride: tl.tensor,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    MAX_QUERIES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_D: tl.constexpr,
    OPERAND: tl.constexpr,
    VECTOR: tl.constexpr,
    WINDOW: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Program (key/value head, work item, row tile): ``TILE_M`` rows over one split."""
    kv_head, item, row_tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    after_previous(OVERLAP)
    sequence, first = tl.load(items + 4 * item), tl.load(items + 4 * item + 1)
    end, splits = tl.load(items + 4 * item + 2), tl.load(items + 4 * item + 3)
    first_token = tl.load(cu_seqlens_q + sequence)
    queries = tl.load(cu_seqlens_q + sequence + 1) - first_token
    if (end == 0) | (row_tile * TILE_M >= queries * GROUP):
        return
    first_position = tl.load(seqused_k + sequence) - queries
    rows = row_tile * TILE_M + tl.arange(0, TILE_M)  # [M]
    number, head = rows // GROUP, kv_head * GROUP + rows % GROUP
    real = number < queries
    token = (first_token + number).to(tl.int64)
    q = load_rows(query + token * token_stride + head * query_head_stride, real, HEAD_DIM, TILE_D, OPERAND)  # [M, D]
    whole, seen_by_all = whole_tiles(first, end, first_position, queries, TILE_N, WINDOW)
    attended, row_max, row_sum = attend(
        q, first_position + number, first, whole, seen_by_all, end, k_cache + kv_head * head_stride,
        v_cache + kv_head * head_stride, block_table + sequence.to(tl.int64) * table_stride, scale_log2, block_stride,
        slot_stride, BLOCK_SIZE, HEAD_DIM, TILE_M, TILE_N, TILE_D, OPERAND, VECTOR, WINDOW,
    )  # fmt: skip
    # A later query's split may hold nothing that an earlier query sees: its average is 0 there, with weight 2^−inf.
    average = attended / tl.where(row_sum == 0, 1.0, row_sum)[:, None]
    if splits == 1:
        store_rows(out + (token * HEADS + head) * HEAD_DIM, average, real, HEAD_DIM, TILE_D)
    else:
        place = (item.to(tl.int64) * HEADS + head) * MAX_QUERIES + number
        store_rows(split_out + place * HEAD_DIM, average, real, HEAD_DIM, TILE_D)
        tl.store(split_lse + place, row_max + tl.log2(tl.where(row_sum == 0, 1.0, row_sum)), real)


@triton.jit
def merge_kernel(
    out: tl.tensor,
    split_out: tl.tensor,
    split_lse: tl.tensor,
    cu_seqlens_q: tl.tensor,
    splits: tl.tensor,
    HEADS: tl.constexpr,
    MAX_QUERIES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE_D: tl.constexpr,
    TILE_H: tl.constexpr,
    AT_ONCE: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Program (sequence and query, TILE_H heads): the averages of their splits' averages, weighted; 0 without a context.

    The plan is older than the kernel before, so it is read while that one still runs.
    """
    sequence, number = tl.program_id(0) // MAX_QUERIES, tl.program_id(0) % MAX_QUERIES
    first_item, num_splits = tl.load(splits + 2 * sequence), tl.load(splits + 2 * sequence + 1)
    first_token = tl.load(cu_seqlens_q + sequence)
    queries = tl.load(cu_seqlens_q + sequence + 1) - first_token
    after_previous(OVERLAP)
    if (num_splits == 1) | (number >= queries) | (queries > MAX_QUERIES):
        return
    head = tl.program_id(1) * TILE_H + tl.arange(0, TILE_H)  # [H]
    dims = tl.arange(0, TILE_D)[None, None, :]
    merged = tl.zeros((TILE_H, TILE_D), tl.float32)
    largest = tl.full((TILE_H,), float("-inf"), tl.float32)
    total = tl.zeros((TILE_H,), tl.float32)
    for start in range(0, num_splits, AT_ONCE):
        split = start + tl.arange(0, AT_ONCE)
        there = (head < HEADS)[:, None] & (split < num_splits)[None, :]  # [H, splits]
        place = ((first_item + split)[None, :].to(tl.int64) * HEADS + head[:, None]) * MAX_QUERIES + number
        lse = tl.load(split_lse + place, mask=there, other=float("-inf"))
        inside = there[:, :, None] & (dims < HEAD_DIM)
        averages = tl.load(split_out + place[:, :, None] * HEAD_DIM + dims, mask=inside, other=0.0)  # [H, splits, D]
        new_largest = tl.maximum(largest, tl.max(lse, 1))
        shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        weights = tl.exp2(lse - shift[:, None])
        rescale = tl.exp2(largest - shift)
        merged = merged * rescale[:, None] + tl.sum(averages * weights[:, :, None], 1)
        total = total * rescale + tl.sum(weights, 1)
        largest = new_largest
    average = merged / tl.where(total == 0, 1.0, total)[:, None]
    row = (first_token + number).to(tl.int64) * HEADS + head
    store_rows(out + row * HEAD_DIM, average, head < HEADS, HEAD_DIM, TILE_D)


@dataclass(frozen=True)
class DecodeTiles:
    """How a launch is cut."""

    tile_m: int
    """Rows a program: (query, head of the group) pairs."""
    tile_n: int
    """Keys a tile."""
    num_warps: int
    num_stages: int
    programs_per_sm: int
    """Programs that fit a multiprocessor together, by the shared memory of their stages."""
    vector: bool = False
    """Products by vector arithmetic."""


def decode_tiles(capability: int, head_dim: int, rows: int, dtype: torch.dtype) -> DecodeTiles:
    """The cut for ``rows`` = queries · G rows a key/value head.

    A tile of 64 keys of 128 numbers in 16 bits, K and V, is 32 KiB, and an H200 needs some 35 KiB under way on each
    multiprocessor to hide a microsecond of latency. So few stages of many programs do: with 2 stages a program has 38 KiB of
    shared memory, and 4 fit (measured: 3 programs of 3 stages were up to 13% slower, since 64 sequences of 8 heads are 512
    programs, which are one wave of 528 and two of 396). Other cuts are by arithmetic.
    """
    if capability < 80 or dtype == torch.float32:
        # Products of M · N · D numbers: 64 a thread of 128.
        tile_n = max(16, 2048 // max(32, padded(head_dim)))
        return DecodeTiles(min(4, power_of_two(rows)), tile_n, 4, 1, 4, vector=True)
    tile_m = min(64 if head_dim <= 128 else 32, max(16, power_of_two(rows)))
    if 90 <= capability < 100:
        if tile_m == 16 and head_dim <= 128:
            return DecodeTiles(tile_m, 64, 4, 2, 4)
        return DecodeTiles(tile_m, 64 if head_dim <= 128 else 32, 4, 3, 3 if tile_m == 16 else 2)
    # Elsewhere the compiler finds no registers for 64 keys; 32 of them in one stage more are as many bytes under way.
    small = capability in (86, 89)  # 100 KiB of shared memory
    return DecodeTiles(tile_m, 32, 4, 3 if small or head_dim > 128 else 4, 2)


def splits_at_once(head_dim: int) -> int:
    """Splits that a merging program takes at once: 32 of heads of 128 numbers, which are 128 registers of each thread."""
    return max(1, SPLITS_AT_ONCE * 128 // max(128, padded(head_dim)))


def plan_decode(
    query_heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    cu_seqlens_q: Int[Tensor, "S_plus_1"],
    seqused_k: Int[Tensor, "S"],
    max_seqlen_q: int,
    max_seqlen_k: int,
    target: Target | None = None,
    window: int | None = None,
) -> SplitPlan:
    """The splits of one step, for every layer of a model with these heads, and with this window if any.

    ``max_seqlen_q`` is the most queries of a sequence that is to be served; those with more are left to another kernel.
    ``max_seqlen_k`` bounds all contexts.
    """
    target = target or target_of(seqused_k.device)
    rows = max_seqlen_q * query_heads // kv_heads
    tiles = decode_tiles(target.capability, head_dim, rows, dtype)
    programs_an_item = kv_heads * -(-rows // tiles.tile_m)
    one_wave = max(1, target.num_sms * tiles.programs_per_sm // programs_an_item)
    return plan_splits(cu_seqlens_q, seqused_k, max_seqlen_q, max_seqlen_k, tiles.tile_n, one_wave, window)


def paged_attention(
    query: Float[Tensor, "T Hq D"],
    k_cache: Float[Tensor, "blocks B Hkv D"],
    v_cache: Float[Tensor, "blocks B Hkv D"],
    block_table: Int[Tensor, "S max_blocks"],
    cu_seqlens_q: Int[Tensor, "S_plus_1"],
    seqused_k: Int[Tensor, "S"],
    softmax_scale: float,
    plan: SplitPlan,
    out: Float[Tensor, "T Hq D"],
    target: Target | None = None,
) -> Float[Tensor, "T Hq D"]:
    """Causal attention of each sequence's newest queries, ``plan.max_queries`` at most, over its own pages.

    The arguments are those of the twin, :func:`refimpl.kernels.reference.paged_attention`, and ``plan``, which was made of
    the same lengths and holds the window. Rows of sequences with more queries are left as they are. Mutates ``out``, and
    returns it.

    Raises:
        RefimplError: a dtype, shape or stride that the kernel cannot read.

    """
    check_inputs(query, k_cache, v_cache, block_table)
    Hq, D, Hkv = *query.shape[1:], k_cache.shape[2]
    rows = plan.max_queries * Hq // Hkv
    tiles = decode_tiles((target or target_of(query.device)).capability, D, rows, query.dtype)
    num_items = len(plan.items)
    split_out = query.new_empty(num_items, Hq, plan.max_queries, D, dtype=torch.float32)
    split_lse = query.new_empty(num_items, Hq, plan.max_queries, dtype=torch.float32)
    sizes = {"HEADS": Hq, "MAX_QUERIES": plan.max_queries, "HEAD_DIM": D, "TILE_D": padded(D)}
    grid = (Hkv, num_items, -(-rows // tiles.tile_m))
    with device_of(query):
        decode_kernel[grid](
            out, split_out, split_lse, query, k_cache, v_cache, block_table, cu_seqlens_q, seqused_k, plan.items,
            softmax_scale * LOG2_E, *query.stride()[:2], block_table.stride(0), *k_cache.stride()[:3],
            GROUP=Hq // Hkv, BLOCK_SIZE=k_cache.shape[1], TILE_M=tiles.tile_m, TILE_N=tiles.tile_n,
            OPERAND=operand(query.dtype, tiles.vector), VECTOR=tiles.vector, WINDOW=plan.window or 0,
            num_warps=tiles.num_warps, num_stages=tiles.num_stages, **sizes, **overlapping(query),
        )  # fmt: skip
        merge_kernel[(len(plan.splits) * plan.max_queries, -(-Hq // HEADS_AT_ONCE))](
            out, split_out, split_lse, cu_seqlens_q, plan.splits,
            TILE_H=HEADS_AT_ONCE, AT_ONCE=splits_at_once(D), num_warps=4, **sizes, **overlapping(query),
        )  # fmt: skip
    return out
