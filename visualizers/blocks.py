"""Blocks: who owns each block of a pool, as arrays: a picture of 100,000 blocks is some operations on whole arrays."""

from __future__ import annotations

from array import array
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

NULL_BLOCK = 0
NOBODY = -1
MANY = 12
"""From so many blocks on, one operation on arrays is faster than a loop."""


@dataclass(frozen=True, slots=True)
class BlockState:
    """One block: its owners, how full it is, and whether its content can be found by others."""

    block_id: int
    owners: tuple[int, ...]
    """Sequence ids, in order of age."""
    index: int
    """Which block of its owners' tables it is; -1 without owners."""
    fill: int
    """Slots that hold a token."""
    published: bool

    @property
    def kind(self) -> Literal["null", "free", "cached", "owned", "shared"]:
        """What to draw."""
        if self.block_id == NULL_BLOCK:
            return "null"
        if not self.owners:
            return "cached" if self.published else "free"
        return "shared" if len(self.owners) > 1 else "owned"


class Blocks:
    """A pool's blocks by id, the null block first. Single ids are read and written as ``array``, many of them as numpy.

    Args:
        num_blocks: usable ones; ids go from 0 to ``num_blocks``.

    """

    def __init__(self, num_blocks: int) -> None:
        size = num_blocks + 1
        self._owner = array("i", [NOBODY]) * size
        self._num_owners = array("i", [0]) * size
        self._index = array("i", [NOBODY]) * size
        self._published = bytearray(size)
        self.owner = np.frombuffer(self._owner, dtype=np.int32)
        """The oldest owner's sequence id, or ``NOBODY``."""
        self.num_owners = np.frombuffer(self._num_owners, dtype=np.int32)
        self.published = np.frombuffer(self._published, dtype=np.uint8)
        """1 if the prefix cache can find the block."""
        self._index_view = np.frombuffer(self._index, dtype=np.int32)
        self.shared: dict[int, list[int]] = {}
        """The owners of each block that has several, in order of age."""
        self.num_used = 0
        self.num_cached = 0
        """Published and without an owner."""

    def owners(self, block_id: int) -> Sequence[int]:
        """Sequence ids, in order of age."""
        if self._num_owners[block_id] < 2:
            return (self._owner[block_id],) if self._num_owners[block_id] else ()
        return self.shared[block_id]

    def count(self, block_id: int) -> int:
        """Owners of one block."""
        return self._num_owners[block_id]

    def index(self, block_id: int) -> int:
        """Which block of its owners' tables it is; ``NOBODY`` without owners."""
        return self._index[block_id]

    def is_published(self, block_id: int) -> bool:
        """Whether the prefix cache can find a block."""
        return bool(self._published[block_id])

    def own(self, sequence_id: int, block_ids: Sequence[int], first: int) -> None:
        """Blocks become those of a sequence's table, from entry ``first`` on."""
        if len(block_ids) >= MANY:
            ids = np.asarray(block_ids, dtype=np.intp)
            if not self.num_owners[ids].any():
                self.owner[ids], self.num_owners[ids] = sequence_id, 1
                self._index_view[ids] = np.arange(first, first + len(ids))
                self.num_used += len(ids)
                self.num_cached -= int(self.published[ids].sum())
                return
        for index, block_id in enumerate(block_ids, start=first):
            self._own(sequence_id, block_id, index)

    def _own(self, sequence_id: int, block_id: int, index: int) -> None:
        number = self._num_owners[block_id]
        if number == 0:
            self._owner[block_id] = sequence_id
            self.num_used += 1
            self.num_cached -= self._published[block_id]
        else:
            if number == 1:
                self.shared[block_id] = [self._owner[block_id]]
            insort(self.shared[block_id], sequence_id)
            self._owner[block_id] = self.shared[block_id][0]
        self._num_owners[block_id] = number + 1
        self._index[block_id] = index

    def disown(self, sequence_id: int, block_ids: Sequence[int]) -> None:
        """Blocks are a sequence's no more."""
        if len(block_ids) >= MANY:
            ids = np.asarray(block_ids, dtype=np.intp)
            if (self.num_owners[ids] == 1).all():
                self.owner[ids] = self._index_view[ids] = NOBODY
                self.num_owners[ids] = 0
                self.num_used -= len(ids)
                self.num_cached += int(self.published[ids].sum())
                return
        for block_id in block_ids:
            self._disown(sequence_id, block_id)

    def _disown(self, sequence_id: int, block_id: int) -> None:
        number = self._num_owners[block_id] = self._num_owners[block_id] - 1
        if number == 0:
            self._owner[block_id] = self._index[block_id] = NOBODY
            self.num_used -= 1
            self.num_cached += self._published[block_id]
            return
        owners = self.shared[block_id]
        owners.remove(sequence_id)
        self._owner[block_id] = owners[0]
        if number == 1:
            del self.shared[block_id]

    def publish(self, block_ids: Sequence[int]) -> None:
        """The prefix cache takes blocks in."""
        for block_id in block_ids:
            if not self._published[block_id]:
                self._published[block_id] = 1
                self.num_cached += not self._num_owners[block_id]

    def unpublish(self, block_ids: Sequence[int]) -> None:
        """The prefix cache forgets blocks."""
        for block_id in block_ids:
            if self._published[block_id]:
                self._published[block_id] = 0
                self.num_cached -= not self._num_owners[block_id]

    def unpublish_all(self) -> None:
        """The prefix cache is emptied."""
        self.published[:] = 0
        self.num_cached = 0

    def findable(self) -> Any:
        """Which blocks are published, a bit each: to be kept, and given to ``publish_as``."""
        return np.packbits(self.published)

    def publish_as(self, findable: Any) -> None:
        """The prefix cache has what it had at the time of ``findable``."""
        self.published[:] = np.unpackbits(findable, count=len(self.published))
        self.num_cached = int((self.published.astype(bool) & (self.num_owners == 0)).sum())
