"""Prefill attention over the paged cache: many queries a sequence, the last ones of its context, causal.

*FlashAttention* (Dao et al. 2022; Dao 2023, "FlashAttention-2"). The scores of a prompt of n tokens are n² numbers, which
the standard way writes to memory and reads back three times over. Here a program takes a *tile* of M queries of one head,
walks over the keys in tiles of N, and keeps a running softmax (:mod:`refimpl.kernels.attention_tiles`); scores never leave
the multiprocessor::

    query   [T, Hq, D]  ─ tile ─►  [M, D]              stays in shared memory
    keys, values  ─ pages ─►  [N, D] each              num_stages − 1 tiles on their way while one is multiplied
    scores [M, N] ─► weights [M, N] ─► attended [M, D]  float32, in registers: M · (N + D) numbers over 4 or 8 warps

*Causal, aligned to the end.* A chunk of n queries at the end of a context of L keys: query i stands at position L − n + i.
The tile that begins at query i is walked up to its last query's key. Tiles of keys before its first query's position are
seen whole by every row and need no comparison; the one or few on the diagonal do. Half of all products are so skipped where
n = L. With a window W of keys the walk begins at the first one that the tile's first query sees: of a long prompt some
``(M + W) / L`` of the tiles are left.

*Variable lengths.* Programs are (head, tile): a map made once a step on the host, where the numbers of queries are known,
says which sequence and which queries a tile is. The tiles with the longest walks come first, so that short ones fill the
end. Heads of one group lie side by side in the grid, and find each other's keys in the L2 cache.

*Bytes.* Queries and outputs once, ``2 · n · Hq · D`` elements; keys and values once from memory, ``2 · L · Hkv · D``, and
``n / M`` times from L2. The standard way moves some ``4 · n · L · Hq`` float32 scores more. *FLOPs*: ``4 · D · Hq`` a pair.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int, Int32
from torch import Tensor

from refimpl.kernels.attention_tiles import (
    LOG2_E,
    Target,
    attend,
    check_inputs,
    first_tile,
    first_whole_tile,
    load_rows,
    operand,
    padded,
    store_rows,
    target_of,
)
from refimpl.kernels.launch import device_of
from refimpl.kernels.transfer import to_device


@triton.jit(do_not_specialize=["table_stride"])
def prefill_kernel(
    out: tl.tensor,
    query: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    block_table: tl.tensor,
    cu_seqlens_q: tl.tensor,
    seqused_k: tl.tensor,
    tiles: tl.tensor,
    scale_log2: tl.tensor,
    token_stride: tl.tensor,
    query_head_stride: tl.tensor,
    table_stride: tl.tensor,
    block_stride: tl.tensor,
    slot_stride: tl.tensor,
    head_stride: tl.tensor,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_D: tl.constexpr,
    OPERAND: tl.constexpr,
    WINDOW: tl.constexpr,
) -> None:
    """Program (head, tile): ``TILE_M`` queries of one sequence over all keys that they see."""
    head, tile = tl.program_id(0), tl.program_id(1)
    kv_head = head // GROUP
    sequence, first_query = tl.load(tiles + 2 * tile), tl.load(tiles + 2 * tile + 1)
    first_token = tl.load(cu_seqlens_q + sequence)
    queries = tl.load(cu_seqlens_q + sequence + 1) - first_token
    context = tl.load(seqused_k + sequence)
    number = first_query + tl.arange(0, TILE_M)  # [M]
    real = number < queries
    token = (first_token + number).to(tl.int64)
    q = load_rows(query + token * token_stride + head * query_head_stride, real, HEAD_DIM, TILE_D, OPERAND)  # [M, D]
    first_position = context - queries + first_query
    end = tl.minimum(first_position + TILE_M, context)
    seen_by_all = tl.maximum(first_position + 1, 0) // TILE_N * TILE_N
    left_behind, first = 0, 0
    if WINDOW:
        left_behind = first_tile(first_position, TILE_N, WINDOW)
        first = first_whole_tile(end - 1, TILE_N, WINDOW)
        seen_by_all = tl.maximum(seen_by_all, first)
    attended, _, row_sum = attend(
        q, context - queries + number, left_behind, first, seen_by_all, end, k_cache + kv_head * head_stride,
        v_cache + kv_head * head_stride, block_table + sequence.to(tl.int64) * table_stride, scale_log2, block_stride,
        slot_stride, BLOCK_SIZE, HEAD_DIM, TILE_M, TILE_N, TILE_D, OPERAND, VECTOR=False, WINDOW=WINDOW,
    )  # fmt: skip
    average = attended / tl.where(row_sum == 0, 1.0, row_sum)[:, None]
    store_rows(out + (token * HEADS + head) * HEAD_DIM, average, real, HEAD_DIM, TILE_D)


@dataclass(frozen=True)
class PrefillTiles:
    """How a launch is cut."""

    tile_m: int
    """Queries a program."""
    tile_n: int
    """Keys a tile."""
    num_warps: int
    num_stages: int


def prefill_tiles(capability: int, head_dim: int, dtype: torch.dtype) -> PrefillTiles:
    """The cut for a device, by arithmetic and by what the compiler finds registers for, not yet by measurement.

    On an H200, 128 queries and two stages of 128 keys and values of 128 16-bit numbers are 32 + 2 · 64 KiB of shared memory;
    the scores and what is attended, 128 · (128 + 128) float32, are 128 registers of each of 256 threads.
    """
    if dtype == torch.float32:  # vector arithmetic
        return PrefillTiles(32, 16, 8, 2)
    if head_dim > 128:
        return PrefillTiles(128 if capability >= 90 else 64, 32, 8, 2)
    if capability >= 90:
        return PrefillTiles(128, 128, 8, 3)
    return PrefillTiles(128, 64 if head_dim <= 64 else 32, 8, 2 if capability in (86, 89) else 3)


def cut_queries(query_lens: list[int], context_lens: list[int], serve_above: int, tile_m: int) -> list[tuple[int, int]]:
    """(sequence, first query) of each tile, the longest walk first; sequences of up to ``serve_above`` queries have none."""
    found = [
        (context_lens[s] - n + first, s, first)
        for s, n in enumerate(query_lens)
        if n > serve_above
        for first in range(0, n, tile_m)
    ]
    return [(s, first) for _, s, first in sorted(found, reverse=True)]


def plan_prefill(
    head_dim: int,
    dtype: torch.dtype,
    query_lens: list[int],
    context_lens: list[int],
    device: torch.device,
    serve_above: int = 0,
    target: Target | None = None,
) -> Int32[Tensor, "tiles 2"]:
    """The tiles of one step, for every layer: the sequences with more than ``serve_above`` queries."""
    tiles = prefill_tiles((target or target_of(device)).capability, head_dim, dtype)
    cut = cut_queries(query_lens, context_lens, serve_above, tiles.tile_m)
    return to_device(torch.tensor(cut, dtype=torch.int32).view(-1, 2), device)


def flash_attention(
    query: Float[Tensor, "T Hq D"],
    k_cache: Float[Tensor, "blocks B Hkv D"],
    v_cache: Float[Tensor, "blocks B Hkv D"],
    block_table: Int[Tensor, "S max_blocks"],
    cu_seqlens_q: Int[Tensor, "S_plus_1"],
    seqused_k: Int[Tensor, "S"],
    softmax_scale: float,
    plan: Int32[Tensor, "tiles 2"],
    out: Float[Tensor, "T Hq D"],
    target: Target | None = None,
    window: int | None = None,
) -> Float[Tensor, "T Hq D"]:
    """Causal attention of each sequence's newest queries over its own pages.

    The arguments are those of the twin, :func:`refimpl.kernels.reference.paged_attention`, and ``plan``, the tiles of
    :func:`plan_prefill`. Rows of sequences without tiles are left as they are. Mutates ``out``, and returns it.

    Raises:
        RefimplError: a dtype, shape or stride that the kernel cannot read.

    """
    check_inputs(query, k_cache, v_cache, block_table)
    Hq, D = query.shape[1:]
    tiles = prefill_tiles((target or target_of(query.device)).capability, D, query.dtype)
    if not len(plan):
        return out
    with device_of(query):
        prefill_kernel[(Hq, len(plan))](
            out,
            query,
            k_cache,
            v_cache,
            block_table,
            cu_seqlens_q,
            seqused_k,
            plan,
            softmax_scale * LOG2_E,
            *query.stride()[:2],
            block_table.stride(0),
            *k_cache.stride()[:3],
            HEADS=Hq,
            GROUP=Hq // k_cache.shape[2],
            BLOCK_SIZE=k_cache.shape[1],
            HEAD_DIM=D,
            TILE_M=tiles.tile_m,
            TILE_N=tiles.tile_n,
            TILE_D=padded(D),
            OPERAND=operand(query.dtype),
            WINDOW=window or 0,
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
        )
    return out
