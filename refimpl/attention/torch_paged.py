"""Paged attention in torch: prefills, chunks and decodes of one step in a few batched products, on any device.

Each sequence's new tokens are cut into *tiles* of at most 256 queries. A tile sees the context up to its last query, so a
long prompt skips most of the upper triangle of its scores. Tiles with equally many queries and contexts of similar length
are stacked into a *group*: all decodes of a step make one group, or a few. A group gathers whole blocks through its block
tables (a block is one contiguous copy), and folds the ``G`` query heads of a key/value head into rows, so that keys and
values are never repeated::

    query  [T, Hq, D]  ─ rows of the group ─►  [tiles, Hkv, n·G, D]
    cache  [blocks, B, Hkv, D]  ─ tables ───►  [tiles, Hkv, L,   D]   ─ softmax(q kᵀ) v ─►  [T, Hq, D]

The softmax is in float32 whatever the dtype (in float64 for float64).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from refimpl.attention.backend import AttentionMetadata
from refimpl.cache.kv_cache import LayerKV

QUERIES_PER_TILE = 256
LONGEST_OVER_SHORTEST = 2
"""Contexts in a group are padded to the longest; one beyond this many times the shortest starts a new group."""


@dataclass(frozen=True)
class Tile:
    """Consecutive queries of one sequence, and the context that the last of them sees."""

    sequence: int
    first_token: int
    num_queries: int
    context: int


@dataclass(frozen=True)
class Group:
    """Tiles that are computed in one product."""

    tokens: Int[Tensor, "rows"]
    """The rows of the flat batch that the tiles' queries are, tile after tile."""
    num_tiles: int
    context: int
    """Keys a tile, the longest one's (``L``)."""
    block_ids: Int[Tensor, "tiles_x_blocks"]
    """The head of the tiles' block tables, tile after tile."""
    visible: Bool[Tensor, "tiles 1 queries L"]
    """Key position ≤ query position: causal, and nothing beyond the context."""
    unwritten: tuple[Int[Tensor, "holes"], Int[Tensor, "holes"]]
    """(tile, position) of gathered slots beyond their tile's context: whatever lies there, even NaN, must not be read."""


def cut_tiles(query_lens: list[int], seqused_k: list[int]) -> list[Tile]:
    """The tiles of a step's sequences."""
    tiles, first_token = [], 0
    for sequence, (queries, context) in enumerate(zip(query_lens, seqused_k, strict=True)):
        for start in range(0, queries, QUERIES_PER_TILE):
            count = min(QUERIES_PER_TILE, queries - start)
            tiles.append(Tile(sequence, first_token + start, count, context - queries + start + count))
        first_token += queries
    return tiles


def group_tiles(tiles: list[Tile]) -> list[list[Tile]]:
    """Tiles with equally many queries and similar contexts, together."""
    groups: list[list[Tile]] = []
    for tile in sorted(tiles, key=lambda tile: (tile.num_queries, tile.context)):
        shortest = groups[-1][0] if groups else None
        if (
            shortest is None
            or tile.num_queries != shortest.num_queries
            or tile.context > LONGEST_OVER_SHORTEST * shortest.context
        ):
            groups.append([])
        groups[-1].append(tile)
    return groups


def make_group(tiles: list[Tile], metadata: AttentionMetadata) -> Group:
    """What all layers share about a group: indices, mask, and the gathered slots to blank."""
    device, block_size = metadata.block_table.device, metadata.block_size
    num_queries, context = tiles[0].num_queries, max(tile.context for tile in tiles)
    num_blocks = -(-context // block_size)
    first = torch.tensor([tile.first_token for tile in tiles], device=device)
    contexts = torch.tensor([tile.context for tile in tiles], device=device)
    sequences = torch.tensor([tile.sequence for tile in tiles], device=device)
    queries = torch.arange(num_queries, device=device)
    keys = torch.arange(context, device=device)
    query_positions = contexts[:, None] - num_queries + queries  # [tiles, queries]
    beyond = keys >= contexts[:, None]
    return Group(
        tokens=(first[:, None] + queries).flatten(),
        num_tiles=len(tiles),
        context=context,
        block_ids=metadata.block_table[sequences, :num_blocks].flatten(),
        visible=(keys <= query_positions[..., None]).unsqueeze(1),
        unwritten=tuple(beyond.nonzero().unbind(1)),  # type: ignore[arg-type]
    )


class TorchPagedStep:
    """One step's groups, ready for every layer."""

    def __init__(self, metadata: AttentionMetadata, softmax_scale: float, scratch: list[Tensor | None]) -> None:
        block_size = metadata.block_size
        self._targets = (metadata.slot_mapping // block_size, metadata.slot_mapping % block_size)
        self._scale = softmax_scale
        self._scratch = scratch
        tiles = cut_tiles(metadata.query_lens, metadata.seqused_k)
        self._groups = [make_group(group, metadata) for group in group_tiles(tiles)]

    def write(self, layer_kv: LayerKV, key: Float[Tensor, "T Hkv D"], value: Float[Tensor, "T Hkv D"]) -> None:
        """Store the new tokens' keys and values in their slots. Mutates ``layer_kv``."""
        # By block and offset, not by a flat view: that would be a copy where blocks lie apart, and the write would be lost.
        layer_kv.k.index_put_(self._targets, key)
        layer_kv.v.index_put_(self._targets, value)

    def attend(self, layer_kv: LayerKV, query: Float[Tensor, "T Hq D"]) -> Float[Tensor, "T Hq D"]:
        """Attention of each new token over its sequence's tokens up to itself."""
        output = torch.empty_like(query)
        for group in self._groups:
            attended = self._attend_group(group, layer_kv, query.index_select(0, group.tokens))
            output.index_copy_(0, group.tokens, attended)
        return output

    def _attend_group(
        self, group: Group, layer_kv: LayerKV, query: Float[Tensor, "rows Hq D"]
    ) -> Float[Tensor, "rows Hq D"]:
        num_kv_heads, head_dim = layer_kv.k.shape[2:]
        keys = self._gather(layer_kv.k, group, 0)
        values = self._gather(layer_kv.v, group, 1)
        folded = query.view(group.num_tiles, -1, num_kv_heads, query.shape[1] // num_kv_heads, head_dim)
        num_queries, G = folded.shape[1], folded.shape[3]
        rows = folded.permute(0, 2, 1, 3, 4).flatten(2, 3)  # [tiles, Hkv, n·G, D]
        visible = group.visible.repeat_interleave(G, dim=2) if num_queries > 1 else group.visible
        attended = F.scaled_dot_product_attention(rows, keys, values, attn_mask=visible, scale=self._scale)
        unfolded: Tensor = attended.unflatten(2, (num_queries, G)).permute(0, 2, 1, 3, 4)
        return unfolded.reshape(query.shape)

    def _gather(self, cache: Float[Tensor, "blocks B Hkv D"], group: Group, which: int) -> Float[Tensor, "tiles Hkv L D"]:
        """The pages of each tile, laid end to end; slots beyond a tile's context are zero."""
        shape = (len(group.block_ids), *cache.shape[1:])
        size = math.prod(shape)
        buffer = self._scratch[which]
        if buffer is None or buffer.numel() < size:
            buffer = self._scratch[which] = cache.new_empty(size)
        pages = buffer[:size].view(shape)
        torch.index_select(cache, 0, group.block_ids, out=pages)
        pages = pages.view(group.num_tiles, -1, *cache.shape[2:])[:, : group.context]  # [tiles, L, Hkv, D]
        if group.unwritten[0].numel():
            pages[group.unwritten] = 0
        return pages.transpose(1, 2)


class TorchPagedAttention:
    """The backend that runs everywhere."""

    name = "torch"

    def __init__(self, softmax_scale: float) -> None:
        self._scale = softmax_scale
        # Gathered keys and values go to the same memory in every layer and step: fresh memory costs a page fault each 4 KiB.
        self._scratch: list[Tensor | None] = [None, None]

    def begin_step(self, metadata: AttentionMetadata) -> TorchPagedStep:
        """Cut and group a step's queries."""
        return TorchPagedStep(metadata, self._scale, self._scratch)
