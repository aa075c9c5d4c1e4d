"""Attention by tiles in plain torch: the walks of our kernels, and a record of the running softmax after every tile.

This is no backend: nothing here is fast. It is the arithmetic of :mod:`refimpl.kernels.attention_tiles` in a dtype of one's
choice, so that it can be looked at, counted, and held against the definition in float64. The kernels count m in powers of
two, since exp2 is what the hardware has; here m is the largest score itself.

*Rows* are what reads one key/value head of one sequence: row r is query ``r // G``, head ``r % G`` of the group. A prefill
takes one head a program (G = 1) and cuts its queries; a decode takes all heads of the group and cuts the context.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor

from refimpl.errors import RefimplError
from refimpl.tile_records import AttentionTrace, Matrix, MergeRecord, TileRecord, Vector, Walk


def _check(num_queries: int, context: int) -> None:
    if not 1 <= num_queries <= context:
        raise RefimplError(
            f"{num_queries} queries over a context of {context}; there must be one or more, and no more than it"
        )


def prefill_walks(num_queries: int, context: int, tile_m: int, tile_n: int) -> tuple[Walk, ...]:
    """Each tile of queries, over the keys up to its last query's position: what :func:`flash_attention` does for a head.

    The kernel begins with the longest walks, so that short ones fill the end; here they stand in the order of their rows.

    Raises:
        RefimplError: there are no queries, or more than the context has tokens.

    """
    _check(num_queries, context)
    found = []
    for first in range(0, num_queries, tile_m):
        position = context - num_queries + first
        seen_by_all = (position + 1) // tile_n * tile_n
        end_key = min(position + tile_m, context)
        found.append(Walk(first, min(first + tile_m, num_queries), 0, seen_by_all, end_key, tile_m, tile_n))
    return tuple(found)


def decode_walks(num_queries: int, group: int, context: int, splits: int, tile_m: int, tile_n: int) -> tuple[Walk, ...]:
    """Each split of the context, over all rows: what :func:`paged_attention` does for a key/value head.

    Splits are even shares of the tiles, as :mod:`refimpl.kernels.split_plan` makes them.

    Raises:
        RefimplError: there are no queries, or more than the context has tokens.

    """
    _check(num_queries, context)
    tiles = -(-context // tile_n)
    splits = min(splits, tiles)
    edges = [min(split * tiles // splits * tile_n, context) for split in range(splits + 1)]
    first_position = context - num_queries
    return tuple(
        Walk(
            row, min(row + tile_m, num_queries * group), first,
            first + max(min(end, first_position + row // group + 1) - first, 0) // tile_n * tile_n, end, tile_m, tile_n,
        )
        for first, end in pairwise(edges)
        for row in range(0, num_queries * group, tile_m)
    )  # fmt: skip


def bytes_asked_for(walks: Sequence[Walk], head_dim: int, itemsize: int) -> int:
    """Bytes that the walks load and store, and their merge. No score is among them.

    ``2 · D`` elements for every key of every tile, ``D`` for the query of every row of every walk, ``D`` for the output of
    every row. Where several walks share their rows, each leaves ``D + 1`` float32 a row, which the merge reads. What several
    walks read may come from the L2 cache all but once.
    """
    keys = sum(walk.end_key - walk.first_key for walk in walks)
    walked, rows = sum(walk.end_row - walk.first_row for walk in walks), max(walk.end_row for walk in walks)
    between = 2 * 4 * (head_dim + 1) * walked if walked > rows else 0
    return head_dim * itemsize * (2 * keys + walked + rows) + between


def bytes_standard(rows: int, context: int, head_dim: int, itemsize: int, score_itemsize: int = 4) -> int:
    """The same with scores in memory: keys, values, queries and outputs once, and four times every score.

    Written by the first product, read and written by the softmax, read by the second product.
    """
    return 2 * head_dim * itemsize * (context + rows) + 4 * score_itemsize * rows * context


def flops_done(walks: Sequence[Walk], head_dim: int) -> int:
    """Floating-point operations of the two products over whole tiles, masked scores among them: ``4 · D`` a score."""
    return sum(4 * head_dim * walk.tile_m * walk.num_tiles * walk.tile_n for walk in walks)


def trace_attention(
    query: Float[Tensor, "n G D"],
    k_cache: Float[Tensor, "blocks B D"],
    v_cache: Float[Tensor, "blocks B D"],
    block_table: Sequence[int],
    context: int,
    softmax_scale: float,
    walks: Sequence[Walk],
) -> AttentionTrace:
    """Follow walks over one key/value head of one sequence, and keep every tile's state.

    Args:
        query: the newest ``n`` queries of the ``G`` heads that share the key/value head.
        k_cache: its keys, in blocks; what lies beyond the context is not looked at, and may be NaN.
        v_cache: its values.
        block_table: the sequence's blocks, in order.
        context: its keys, the new ones among them.
        softmax_scale: what products are multiplied by.
        walks: those of :func:`prefill_walks` or :func:`decode_walks`, which cover each row's keys.

    Raises:
        RefimplError: the context is shorter than the queries, or longer than the table's blocks.

    """
    n, G, _ = query.shape
    if not n <= context <= len(block_table) * k_cache.shape[1]:
        raise RefimplError(
            f"context is {context} with {n} queries and {len(block_table)} blocks of {k_cache.shape[1]}; it must hold the "
            "queries, and fit the blocks"
        )
    rows = query.flatten(0, 1)
    positions = torch.arange(context - n, context).repeat_interleave(G)  # [rows]
    tiles: list[TileRecord] = []
    states = []
    for number, walk in enumerate(walks):
        own = slice(walk.first_row, walk.end_row)
        row_max, row_sum, attended = _start(rows[own])
        for first_key, masked in walk.tiles():
            exists = torch.arange(first_key, first_key + walk.tile_n) < min(walk.end_key, context)
            keys, values, block_ids = _load_tile(k_cache, v_cache, block_table, first_key, exists)
            scores = rows[own] @ keys.T * softmax_scale  # [M, N]
            seen = (torch.arange(first_key, first_key + walk.tile_n) <= positions[own, None]) & exists
            scores = scores.masked_fill(~seen, -math.inf) if masked else scores
            row_max, row_sum, attended, rescale = take_tile(row_max, row_sum, attended, scores, values)
            told = (_matrix(scores), _vector(rescale), _vector(row_max), _vector(row_sum), _matrix(attended))
            tiles.append(TileRecord(number, first_key, masked, block_ids, *told))
        states.append((row_max, row_sum, attended))
    merge, output = _merge(walks, states, rows)
    table = tuple(int(block_id) for block_id in block_table)
    return AttentionTrace(n, G, context, k_cache.shape[1], table, tuple(walks), tuple(tiles), merge, _matrix(output))


State = tuple[Tensor, Tensor, Tensor]
"""m, l and a of some rows: the largest score, the sum of exp(score − m), and that of exp(score − m) times the value."""


def _start(query: Float[Tensor, "M D"]) -> State:
    """A state that has seen nothing."""
    return query.new_full((len(query),), -math.inf), query.new_zeros(len(query)), torch.zeros_like(query)


def take_tile(
    row_max: Float[Tensor, "M"],
    row_sum: Float[Tensor, "M"],
    attended: Float[Tensor, "M D"],
    scores: Float[Tensor, "M N"],
    values: Float[Tensor, "N D"],
) -> tuple[Float[Tensor, "M"], Float[Tensor, "M"], Float[Tensor, "M D"], Float[Tensor, "M"]]:
    """One step of the online softmax: the state after a tile, and what the old state was multiplied by."""
    new_max = torch.maximum(row_max, scores.amax(1))
    shift = new_max.masked_fill(new_max == -math.inf, 0)  # a row that has seen no key yet: −inf − −inf would be NaN
    weights = torch.exp(scores - shift[:, None])
    rescale = torch.exp(row_max - shift)
    return new_max, row_sum * rescale + weights.sum(1), attended * rescale[:, None] + weights @ values, rescale


def _load_tile(
    k_cache: Tensor, v_cache: Tensor, block_table: Sequence[int], first_key: int, exists: Tensor
) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """Keys and values ``[N, D]``, 0 where none exist, and the blocks that they come from."""
    B = k_cache.shape[1]
    positions = torch.arange(first_key, first_key + len(exists))[exists]
    ids = torch.tensor([int(block_table[p]) for p in (positions // B).tolist()])
    loaded = []
    for cache in (k_cache, v_cache):
        tile = cache.new_zeros(len(exists), cache.shape[2])
        tile[exists] = cache[ids, positions % B]
        loaded.append(tile)
    return loaded[0], loaded[1], tuple(dict.fromkeys(ids.tolist()))


def _merge(walks: Sequence[Walk], states: list[State], rows: Tensor) -> tuple[MergeRecord | None, Tensor]:
    """Each row's average over all its walks; a record of it where rows have several."""
    lse = rows.new_full((len(walks), len(rows)), -math.inf)
    averages = rows.new_zeros(len(walks), *rows.shape)
    for number, (walk, (row_max, row_sum, attended)) in enumerate(zip(walks, states, strict=True)):
        own = slice(walk.first_row, walk.end_row)
        lse[number, own] = row_max + torch.log(row_sum)
        averages[number, own] = attended / row_sum.masked_fill(row_sum == 0, 1)[:, None]
    shares = lse.softmax(0)
    output = torch.einsum("wr,wrd->rd", shares, averages)
    several = len({walk.first_key for walk in walks}) > 1
    return (MergeRecord(_matrix(lse), _matrix(shares)) if several else None), output


def _vector(values: Tensor) -> Vector:
    return tuple(values.tolist())


def _matrix(values: Tensor) -> Matrix:
    return tuple(tuple(row) for row in values.tolist())
