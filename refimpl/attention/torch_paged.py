"""Paged attention in torch: prefills, chunks and decodes of one step in a few batched products, on any device.

Each sequence's new tokens are cut into *tiles* of at most 256 queries. A tile sees the context up to its last query, so a
long prompt skips most of the upper triangle of its scores. Tiles with equally many queries and contexts of similar length
are stacked into a *group*: all decodes of a step make one group, or a few. A group gathers whole blocks through its block
tables (a block is one contiguous copy; on a CPU blocks that follow each other are read where they are), and folds the ``G``
query heads of a key/value head into rows, so that keys and values are never repeated::

    query  [T, Hq, D]  ─ rows of the group ─►  [tiles, Hkv, n·G, D]
    cache  [blocks, B, Hkv, D]  ─ tables ───►  [tiles, Hkv, L,   D]   ─ softmax(q kᵀ) v ─►  [T, Hq, D]

What needs no mask gets none: decodes whose contexts are equally long, and, on a CPU, a prompt that is computed from its
first token on. That is one tile, whatever its length: the CPU's operation skips the upper triangle by itself.

In a layer with a *window* a tile begins at the block of the first key that its first query sees; what lies before is not
gathered, and a mask hides the rest. Where no context of a step is longer than the window, there is none.
The softmax is in float32 whatever the dtype (in float64 for float64).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from refimpl.attention.backend import AttentionMetadata
from refimpl.cache.kv_cache import LayerKV
from refimpl.kernels.transfer import array_to_device

QUERIES_PER_TILE = 256
LONGEST_OVER_SHORTEST = 2
"""Contexts in a group are padded to the longest; one beyond this many times the shortest starts a new group."""


@dataclass(frozen=True)
class Tiles:
    """Some tiles, each consecutive queries of one sequence: parallel arrays, since a step has one a sequence or more."""

    sequences: np.ndarray
    first_tokens: np.ndarray
    num_queries: np.ndarray
    contexts: np.ndarray
    """Keys that are gathered for each: up to its last query's, from ``first_blocks`` on."""
    first_blocks: np.ndarray | None = None
    """Blocks at the head of each one's table that lie before its window. None: there is no window."""

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, chosen: np.ndarray) -> Tiles:
        """Some of them, in the order of the indices."""
        skipped = None if self.first_blocks is None else self.first_blocks[chosen]
        own = (self.sequences[chosen], self.first_tokens[chosen], self.num_queries[chosen], self.contexts[chosen])
        return Tiles(*own, skipped)

    def within(self, window: int, block_size: int) -> Tiles:
        """The same where one attends to ``window`` tokens."""
        first_seen = np.maximum(self.contexts - self.num_queries - window + 1, 0)  # by the first query
        skipped = first_seen // block_size
        return replace(self, contexts=self.contexts - skipped * block_size, first_blocks=skipped)


@dataclass(frozen=True)
class Group:
    """Tiles that are computed in one product."""

    tokens: Int[Tensor, "rows"] | None
    """The rows of the flat batch that the tiles' queries are, tile after tile; None where that is the batch as it is."""
    num_tiles: int
    num_queries: int
    """Queries a tile (``n``)."""
    context: int
    """Keys a tile, the longest one's (``L``)."""
    block_ids: Int[Tensor, "tiles_x_blocks"]
    """The head of the tiles' block tables, tile after tile."""
    in_place: int | None
    """The first block of a lone tile whose blocks follow each other in the cache: it is read where it lies."""
    from_start: bool
    """Whether the tiles are prompts from their first token on, so that query i sees the keys up to i."""
    hidden: Bool[Tensor, "tiles 1 queries L"] | None
    """Key position > query position: what lies ahead, or beyond the context; and what the window has left behind. None where
    a mask is not needed."""
    unwritten: tuple[Int[Tensor, "holes"], Int[Tensor, "holes"]] | None
    """(tile, position) of gathered slots beyond their tile's context: whatever lies there, even NaN, must not be read."""


def cut_tiles(query_lens: list[int], context_lens: list[int], whole_prompts: bool = False) -> Tiles:
    """The tiles of a step's sequences, in the order of their tokens.

    ``whole_prompts``: sequences that begin in this step are one tile each.
    """
    queries, contexts = np.array(query_lens), np.array(context_lens)
    if (queries == 1).all():  # decodes alone: most steps
        sequences = np.arange(len(queries))
        return Tiles(sequences, sequences, queries, contexts)
    most = np.where(whole_prompts & (queries == contexts), np.maximum(queries, 1), QUERIES_PER_TILE)
    tiles = -(-queries // most)
    sequences = np.repeat(np.arange(len(queries)), tiles)
    starts = (np.arange(len(sequences)) - (tiles.cumsum() - tiles)[sequences]) * most[sequences]
    counts = np.minimum(most[sequences], queries[sequences] - starts)
    first_tokens = (queries.cumsum() - queries)[sequences] + starts
    return Tiles(sequences, first_tokens, counts, (contexts - queries)[sequences] + starts + counts)


def group_tiles(tiles: Tiles) -> list[Tiles]:
    """Tiles with equally many queries and similar contexts, together; in each group in the order of their tokens."""
    if not len(tiles.sequences):
        return []
    alone = tiles.num_queries.min() == tiles.num_queries.max()
    if alone and tiles.contexts.max() <= LONGEST_OVER_SHORTEST * tiles.contexts.min():
        return [tiles]
    order = np.lexsort((tiles.contexts, tiles.num_queries))
    num_queries, contexts = tiles.num_queries[order], tiles.contexts[order]
    groups, start = [], 0
    while start < len(order):
        alike = np.searchsorted(num_queries, num_queries[start], side="right")
        longest = LONGEST_OVER_SHORTEST * contexts[start]
        end = start + int(np.searchsorted(contexts[start:alike], longest, side="right"))
        groups.append(tiles[np.sort(order[start:end])])
        start = end
    return groups


def make_group(tiles: Tiles, metadata: AttentionMetadata, window: int | None = None) -> Group:
    """What all layers of a window share about a group: indices, mask, and the gathered slots to blank."""
    device = metadata.block_table.device
    num_queries = int(tiles.num_queries[0])
    shortest, context = int(tiles.contexts.min()), int(tiles.contexts.max())
    prompts = num_queries > 1 and shortest == context == num_queries
    from_start = prompts and device.type == "cpu" and window is None
    in_order = len(tiles) * num_queries == sum(metadata.query_lens)
    masked = window is not None or not (from_start or (num_queries == 1 and shortest == context))
    hidden, unwritten = _masks(tiles.contexts, num_queries, device, window) if masked else (None, None)
    tokens = None if in_order else np.add.outer(tiles.first_tokens, np.arange(num_queries)).ravel()
    block_ids = _gathered_blocks(tiles, -(-context // metadata.block_size), metadata.block_table)
    return Group(
        tokens=None if tokens is None else array_to_device(tokens, device),
        num_tiles=len(tiles),
        num_queries=num_queries,
        context=context,
        block_ids=block_ids,
        in_place=_consecutive(block_ids) if len(tiles) == 1 and device.type == "cpu" else None,
        from_start=from_start,
        hidden=hidden,
        unwritten=unwritten if shortest < context else None,
    )


def _gathered_blocks(
    tiles: Tiles, num_blocks: int, block_table: Int[Tensor, "S max_blocks"]
) -> Int[Tensor, "tiles_x_blocks"]:
    """``num_blocks`` of each tile's table, tile after tile."""
    sequences = array_to_device(tiles.sequences, block_table.device)
    if tiles.first_blocks is None:
        return block_table[:, :num_blocks][sequences].flatten()
    places = tiles.first_blocks[:, None] + np.arange(num_blocks)
    places = np.minimum(places, block_table.shape[1] - 1)  # beyond a shorter context: whatever is there is blanked
    return block_table[sequences[:, None], array_to_device(places, block_table.device)].flatten()


def _consecutive(block_ids: Int[Tensor, "blocks"]) -> int | None:
    """The first of blocks that follow each other."""
    ids = block_ids.numpy()
    return int(ids[0]) if (np.diff(ids) == 1).all() else None


def _masks(
    lengths: np.ndarray, num_queries: int, device: torch.device, window: int | None
) -> tuple[Bool[Tensor, "tiles 1 queries L"], tuple[Int[Tensor, "holes"], Int[Tensor, "holes"]]]:
    """What the queries of each tile may not see, and the slots of a group beyond the contexts of its tiles."""
    contexts = array_to_device(lengths, device).unsqueeze(1)
    keys, queries = torch.arange(int(lengths.max()), device=device), torch.arange(num_queries, device=device)
    positions = (contexts - num_queries + queries)[..., None]
    hidden = keys > positions
    if window is not None:
        hidden |= keys <= positions - window
    tile, position = (keys >= contexts).nonzero().unbind(1)
    return hidden.unsqueeze(1), (tile, position)


class TorchPagedStep:
    """One step's groups, ready for every layer; those of a window are made in the first layer that has it."""

    def __init__(self, metadata: AttentionMetadata, softmax_scale: float, scratch: list[Tensor | None]) -> None:
        block_size = metadata.block_size
        self._targets = (metadata.slot_mapping // block_size, metadata.slot_mapping % block_size)
        self._scale = softmax_scale
        self._scratch = scratch
        self._metadata = metadata
        self._masked_groups: dict[int | None, list[tuple[Group, Tensor | None]]] = {}
        """By window: groups, each with its mask."""

    def write(self, layer_kv: LayerKV, key: Float[Tensor, "T Hkv D"], value: Float[Tensor, "T Hkv D"]) -> None:
        """Store the new tokens' keys and values in their slots. Mutates ``layer_kv``."""
        # By block and offset, not by a flat view: that would be a copy where blocks lie apart, and the write would be lost.
        layer_kv.k.index_put_(self._targets, key)
        layer_kv.v.index_put_(self._targets, value)

    def attend(
        self, layer_kv: LayerKV, query: Float[Tensor, "T Hq D"], window: int | None = None
    ) -> Float[Tensor, "T Hq D"]:
        """Attention of each new token over its sequence's tokens up to itself, or over the last ``window`` of them."""
        if window is not None and window >= self._metadata.max_seqlen_k:
            window = None
        if window not in self._masked_groups:  # the first layer: the masks' dtype is the query's
            G = query.shape[1] // layer_kv.k.shape[2]
            made = self._make_groups(window)
            self._masked_groups[window] = [(group, _additive_mask(group, query, G)) for group in made]
        groups = self._masked_groups[window]
        if len(groups) == 1 and groups[0][0].tokens is None:
            return self._attend_group(*groups[0], layer_kv, query)
        output = torch.empty_like(query)
        for group, mask in groups:
            assert group.tokens is not None, "a group of all tokens is the only one"
            attended = self._attend_group(group, mask, layer_kv, query.index_select(0, group.tokens))
            output.index_copy_(0, group.tokens, attended)
        return output

    def _make_groups(self, window: int | None) -> list[Group]:
        step = self._metadata
        whole_prompts = window is None and step.block_table.device.type == "cpu"
        tiles = cut_tiles(step.query_lens, step.context_lens, whole_prompts)
        tiles = tiles if window is None else tiles.within(window, step.block_size)
        return [make_group(group, step, window) for group in group_tiles(tiles)]

    def _attend_group(
        self, group: Group, mask: Float[Tensor, "tiles 1 _ L"] | None, layer_kv: LayerKV, query: Float[Tensor, "rows Hq D"]
    ) -> Float[Tensor, "rows Hq D"]:
        Hkv = layer_kv.k.shape[2]
        keys = self._gather(layer_kv.k, group, 0)
        values = self._gather(layer_kv.v, group, 1)
        tiles, n, (_, Hq, D) = group.num_tiles, group.num_queries, query.shape
        if group.from_start:
            attended = F.scaled_dot_product_attention(
                query.view(tiles, n, Hq, D).transpose(1, 2), keys, values, is_causal=True, scale=self._scale, enable_gqa=True
            )
            return attended.transpose(1, 2).flatten(0, 1)
        if n == 1:  # most steps: as below, with fewer views
            rows = query.view(tiles, Hkv, Hq // Hkv, D)
            return F.scaled_dot_product_attention(rows, keys, values, attn_mask=mask, scale=self._scale).reshape(query.shape)
        folded = query.view(tiles, n, Hkv, Hq // Hkv, D).transpose(1, 2)  # [tiles, Hkv, n, G, D]
        rows = folded.flatten(2, 3)
        attended = F.scaled_dot_product_attention(rows, keys, values, attn_mask=mask, scale=self._scale)
        unfolded: Tensor = attended.view(folded.shape).transpose(1, 2)
        return unfolded.reshape(query.shape)

    def _gather(self, cache: Float[Tensor, "blocks B Hkv D"], group: Group, which: int) -> Float[Tensor, "tiles Hkv L D"]:
        """The pages of each tile, laid end to end; slots beyond a tile's context are zero."""
        if group.in_place is not None and cache.is_contiguous():
            _, block_size, Hkv, D = cache.shape
            first = cache.storage_offset() + group.in_place * block_size * Hkv * D
            return cache.as_strided((1, Hkv, group.context, D), (0, D, Hkv * D, 1), first)  # one view in place of five
        shape = (len(group.block_ids), *cache.shape[1:])
        size = math.prod(shape)
        buffer = self._scratch[which]
        if buffer is None or buffer.numel() < size:
            buffer = self._scratch[which] = cache.new_empty(size)
        pages = buffer[:size].view(shape)
        torch.index_select(cache, 0, group.block_ids, out=pages)
        pages = pages.view(group.num_tiles, -1, *cache.shape[2:])[:, : group.context]  # [tiles, L, Hkv, D]
        if group.unwritten is not None:
            pages[group.unwritten] = 0
        return pages.transpose(1, 2)


def _additive_mask(group: Group, query: Float[Tensor, "T Hq D"], G: int) -> Float[Tensor, "tiles 1 _ L"] | None:
    """0 and −inf, as the operation wants it, once a step; one row for each of the ``n · G`` that are folded together."""
    if group.hidden is None:
        return None
    hidden = group.hidden.repeat_interleave(G, dim=2) if group.num_queries > 1 else group.hidden
    return query.new_zeros(hidden.shape).masked_fill_(hidden, -math.inf)


class TorchPagedAttention:
    """The backend that runs everywhere."""

    name = "torch"
    serves_windows = True

    def __init__(self, softmax_scale: float) -> None:
        self._scale = softmax_scale
        # Gathered keys and values go to the same memory in every layer and step: fresh memory costs a page fault each 4 KiB.
        self._scratch: list[Tensor | None] = [None, None]

    def begin_step(self, metadata: AttentionMetadata) -> TorchPagedStep:
        """Cut and group a step's queries."""
        return TorchPagedStep(metadata, self._scale, self._scratch)
