"""What attention by tiles did, as plain numbers: who walks over which keys, and the running softmax after each tile.

Walks are a plan, of whole numbers alone: they can be counted for contexts of any length. The records of tiles hold their
numbers, and are for contexts that a picture has room for. :mod:`refimpl.attention.tiles` makes both.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

Matrix = tuple[tuple[float, ...], ...]
Vector = tuple[float, ...]


@dataclass(frozen=True)
class Walk:
    """One program: the rows ``first_row … end_row`` of queries, over the keys ``first_key … end_key``, tile by tile."""

    first_row: int
    end_row: int
    first_key: int
    unmasked_end: int
    """All rows see the tiles before this key whole; those from here on are compared with the rows' positions."""
    end_key: int
    tile_m: int
    tile_n: int

    def tiles(self) -> Iterator[tuple[int, bool]]:
        """(first key, whether its scores are masked) of each tile, in the order of the walk."""
        for key in range(self.first_key, self.end_key, self.tile_n):
            yield key, key >= self.unmasked_end

    @property
    def num_tiles(self) -> int:
        """Tiles of keys that it takes in."""
        return -(-(self.end_key - self.first_key) // self.tile_n)


@dataclass(frozen=True)
class TileRecord:
    """A tile of keys that a walk took in, and the walk's state after it. Rows are those of the walk."""

    walk: int
    """Which walk it belongs to."""
    first_key: int
    masked: bool
    block_ids: tuple[int, ...]
    """The blocks of the cache that its keys were read from."""
    scores: Matrix
    """``[rows, tile_n]``; −inf where a row does not see the key, or none is there."""
    rescale: Vector
    """``[rows]``: what ``row_sum`` and ``attended`` were multiplied by, ``exp(m before − m)``."""
    row_max: Vector
    """``[rows]``: m, the largest score so far; −inf where a row has seen no key."""
    row_sum: Vector
    """``[rows]``: l, the sum of exp(score − m)."""
    attended: Matrix
    """``[rows, D]``: a, the sum of exp(score − m) times the value."""


@dataclass(frozen=True)
class MergeRecord:
    """What several walks over the same rows came to: averages, weighted by their denominators."""

    lse: Matrix
    """``[walks, rows]``: m + log l of each walk; −inf for rows that are not its own, and where it saw nothing."""
    shares: Matrix
    """``[walks, rows]``: each one's weight in the average, exp(lse) over their sum."""


@dataclass(frozen=True)
class AttentionTrace:
    """Attention of the ``num_rows`` rows that read one key/value head of one sequence, over its ``context`` keys."""

    num_queries: int
    group: int
    """Query heads that share the key/value head: row r is query ``r // group``, head ``r % group``."""
    context: int
    block_size: int
    block_table: tuple[int, ...]
    walks: tuple[Walk, ...]
    tiles: tuple[TileRecord, ...]
    merge: MergeRecord | None
    output: Matrix
    """``[rows, D]``."""

    @property
    def num_rows(self) -> int:
        """Queries times heads of the group."""
        return self.num_queries * self.group

    def position_of(self, row: int) -> int:
        """The key that a row's query stands at, the last one that it sees."""
        return self.context - self.num_queries + row // self.group
