"""Who computes what in decode attention: contexts cut into splits, by lengths that only the device knows.

*Flash-Decoding* (Dao, Haziza, Massa and Sizov 2023): one query a sequence gives ``S · Hkv`` programs, too few for a GPU of
132 multiprocessors, and as slow as the longest context. So a context is cut into *splits* that are computed side by side
and merged afterwards.

The cut is made once a step for all layers, by one small kernel, from the lengths where they are: on the device. So a CUDA
graph, whose grid is fixed, serves any lengths. A program of the decode kernel finds what to do in its *work item*
``(sequence, first key, end, splits of this sequence)``, four integers side by side; items that are left over are empty,
and their programs leave at once::

    lengths   [700, 90, 0, 3000]     tiles of 64 keys   [11, 2, 0, 47]     together 60
    tiles a split 16             →   splits             [ 1, 1, 0,  3]     items (0, 0, 700, 1) (1, 0, 90, 1) (3, 0, 960, 3)

How many tiles a split has is weighed. Programs come in *waves*, of as many as are resident at the same time; a wave lasts as
long as its longest split and its start, and splits must be merged. So ``WEIGHED`` sizes are tried, from the least that is
allowed (``FEWEST`` tiles, and ``WAVES`` waves) to about twice a single wave's, and that is taken, the larger of equals, for
which this is the least::

    waves · (START + tiles of the longest split) + (MERGE, if there is a split)

Few sequences are so cut into one wave; 64 that fill a wave as they are stay whole; and 80, which would leave the second of
two waves nearly empty, are cut.

Where one attends to a window alone, what lies before the first query's is no part of the context that is cut.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from jaxtyping import Int32
from torch import Tensor

from refimpl.kernels.launch import device_of, power_of_two

FEWEST = 2
WAVES = 4
START = 2
MERGE = 2
"""What a program's start and the launch that merges cost, in tiles. By arithmetic: some two microseconds each."""
WEIGHED = 16
ITEM = 4
"""Integers in a work item."""


@triton.jit(do_not_specialize=["num_sequences", "num_items", "one_wave"])
def plan_kernel(
    items: tl.tensor,
    splits: tl.tensor,
    cu_seqlens_q: tl.tensor,
    seqused_k: tl.tensor,
    num_sequences: tl.tensor,
    num_items: tl.tensor,
    one_wave: tl.tensor,
    MAX_QUERIES: tl.constexpr,
    TILE_N: tl.constexpr,
    FEWEST: tl.constexpr,
    WAVES: tl.constexpr,
    START: tl.constexpr,
    MERGE: tl.constexpr,
    WEIGHED: tl.constexpr,
    SEQUENCES: tl.constexpr,
    CHUNK: tl.constexpr,
    WINDOW: tl.constexpr,
) -> None:
    """Program s writes the items of sequence s: every program adds up all lengths, so that none waits for another.

    ``items [num_items, 4]``; ``splits [S, 2]``: a sequence's first item, and how many it has.
    """
    sequence = tl.program_id(0)
    s = tl.arange(0, SEQUENCES)
    exists = s < num_sequences
    queries = tl.load(cu_seqlens_q + s + 1, exists, 0) - tl.load(cu_seqlens_q + s, exists, 0)
    contexts = tl.load(seqused_k + s, exists, 0)
    tiles = tl.where(queries <= MAX_QUERIES, tl.cdiv(contexts, TILE_N), 0)  # [SEQUENCES]
    skipped = tl.maximum(contexts - queries - WINDOW + 1, 0) // TILE_N if WINDOW else 0
    tiles = tl.maximum(tiles - skipped, 0) if WINDOW else tiles  # below 0 where they were none
    total = tl.sum(tiles, 0)
    least = tl.maximum(FEWEST, tl.cdiv(total, WAVES * one_wave))
    sizes = least + tl.arange(0, WEIGHED) * tl.maximum(1, tl.cdiv(2 * total, WEIGHED * one_wave))  # [WEIGHED]
    cut = tl.maximum(tl.cdiv(tiles[None, :], sizes[:, None]), 1)  # [WEIGHED, SEQUENCES]; one that is empty counts for none
    waves = tl.cdiv(tl.sum(tl.where(tiles[None, :] > 0, cut, 0), 1), one_wave)
    costs = waves * (START + tl.max(tl.cdiv(tiles[None, :], cut), 1)) + tl.where(tl.max(cut, 1) > 1, MERGE, 0)
    tiles_a_split = tl.max(tl.where(costs == tl.min(costs, 0), sizes, 0), 0)
    counts = tl.cdiv(tiles, tiles_a_split)
    first_item = tl.sum(tl.where(s < sequence, counts, 0), 0)
    own_splits = tl.sum(tl.where(s == sequence, counts, 0), 0)
    own_tiles = tl.sum(tl.where(s == sequence, tiles, 0), 0)
    context = tl.sum(tl.where(s == sequence, contexts, 0), 0)
    own_first = tl.sum(tl.where(s == sequence, skipped, 0), 0) if WINDOW else 0
    tl.store(splits + 2 * sequence, first_item)
    tl.store(splits + 2 * sequence + 1, own_splits)
    for start in range(0, own_splits, CHUNK):
        split = start + tl.arange(0, CHUNK)  # [CHUNK]
        own = split < own_splits
        item = items + 4 * (first_item + split)
        # Even shares: they differ by one tile at most, and none is empty.
        tl.store(item, sequence, own)
        tl.store(item + 1, (own_first + split * own_tiles // own_splits) * TILE_N, own)
        tl.store(item + 2, tl.minimum((own_first + (split + 1) * own_tiles // own_splits) * TILE_N, context), own)
        tl.store(item + 3, own_splits, own)
    if sequence == num_sequences - 1:
        for start in range(first_item + own_splits, num_items, CHUNK):
            left_over = start + tl.arange(0, CHUNK)
            for column in tl.static_range(4):
                tl.store(items + 4 * left_over + column, 0, left_over < num_items)


@dataclass(frozen=True)
class SplitPlan:
    """The work of one step's decode attention, for every layer."""

    items: Int32[Tensor, "items 4"]
    """(sequence, first key, end, splits of the sequence); an empty one has end 0."""
    splits: Int32[Tensor, "S 2"]
    """Each sequence's first item, and its number of splits: 0 where it has no context, or more than ``max_queries``."""
    max_queries: int
    """Sequences with more queries are not served here."""
    window: int | None = None
    """How many keys a query sees, the last of them its own; None: all."""


def count_items(num_sequences: int, max_seqlen_k: int, tile_n: int, one_wave: int) -> int:
    """The most items that ``num_sequences`` contexts of up to ``max_seqlen_k`` keys can come to: the size of the grid."""
    most_tiles = num_sequences * -(-max_seqlen_k // tile_n)
    return max(1, min(WAVES * one_wave, -(-most_tiles // FEWEST)) + num_sequences)


def plan_splits(
    cu_seqlens_q: Int32[Tensor, "S_plus_1"],
    seqused_k: Int32[Tensor, "S"],
    max_queries: int,
    max_seqlen_k: int,
    tile_n: int,
    one_wave: int,
    window: int | None = None,
) -> SplitPlan:
    """Cut a step's contexts into splits, of what lies within the window if there is one.

    ``max_seqlen_k`` bounds every context, now and whenever a graph of it is replayed; ``one_wave`` is how many items one
    wave of programs computes; ``tile_n`` keys are a tile.
    """
    S, device = len(seqused_k), seqused_k.device
    if window is not None:  # what max_queries windows reach over, and the rest of the tile that it begins in
        max_seqlen_k = min(max_seqlen_k, window + max_queries - 1 + tile_n - 1)
    num_items = count_items(S, max_seqlen_k, tile_n, one_wave)
    items = torch.empty(num_items, ITEM, dtype=torch.int32, device=device)
    splits = torch.empty(S, 2, dtype=torch.int32, device=device)
    with device_of(seqused_k):
        plan_kernel[(S,)](
            items,
            splits,
            cu_seqlens_q,
            seqused_k,
            S,
            num_items,
            one_wave,
            MAX_QUERIES=max_queries,
            TILE_N=tile_n,
            FEWEST=FEWEST,
            WAVES=WAVES,
            START=START,
            MERGE=MERGE,
            WEIGHED=WEIGHED,
            SEQUENCES=max(16, power_of_two(S)),
            CHUNK=32,
            WINDOW=window or 0,
        )
    return SplitPlan(items, splits, max_queries, window)
