"""Block allocators: which free block is next. An allocator is a class of about ten lines, given as ``block_allocator``.

It is made with the number of blocks, and knows numbers only. The pool checks each answer, so an allocator can be unwise but
not unsafe: a block that is given twice is refused with a sentence.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from refimpl.errors import ConfigError


@runtime_checkable
class BlockAllocator(Protocol):
    """What the pool asks. Blocks are ``1 … num_blocks``, all free at first."""

    def allocate(self, count: int) -> list[int] | None:
        """The next ``count`` free blocks. Asked only while there are as many; None says that there are not."""

    def free(self, block_ids: list[int]) -> None:
        """These blocks, which it gave out, are free again; the last block of a sequence comes first."""


class FirstFreedFirst:
    """The block that is free for the longest time is next: a queue."""

    name = "first_freed_first"

    def __init__(self, num_blocks: int) -> None:
        self._free = deque(range(1, num_blocks + 1))

    def allocate(self, count: int) -> list[int] | None:
        """From the front of the queue."""
        return [self._free.popleft() for _ in range(count)] if count <= len(self._free) else None

    def free(self, block_ids: list[int]) -> None:
        """To its end."""
        self._free.extend(block_ids)


class LowestFirst:
    """An example: the lowest number is next, so the blocks in use stay together at the beginning of the cache."""

    name = "lowest_first"

    def __init__(self, num_blocks: int) -> None:
        self._free = list(range(1, num_blocks + 1))

    def allocate(self, count: int) -> list[int] | None:
        """From the top of the heap."""
        return [heapq.heappop(self._free) for _ in range(count)] if count <= len(self._free) else None

    def free(self, block_ids: list[int]) -> None:
        """Back into the heap."""
        for block_id in block_ids:
            heapq.heappush(self._free, block_id)


MakeAllocator = Callable[[int], BlockAllocator]

BY_NAME: dict[str, MakeAllocator] = {FirstFreedFirst.name: FirstFreedFirst, LowestFirst.name: LowestFirst}


def choose_allocator(given: Any) -> MakeAllocator:
    """What makes the allocator of a name; or, checked as it is made, what was given to make one.

    Raises:
        ConfigError: no allocator has that name, it is no class, or what it makes lacks a part.

    """
    if isinstance(given, str):
        if given not in BY_NAME:
            raise ConfigError(f"block_allocator is {given!r}; it must be one of {', '.join(BY_NAME)}, or a class")
        return BY_NAME[given]
    if not callable(given):
        raise ConfigError(
            f"block_allocator is a {type(given).__name__}; it must be a name, or a class that is made with num_blocks"
        )

    def make(num_blocks: int) -> BlockAllocator:
        allocator = given(num_blocks)
        if not isinstance(allocator, BlockAllocator):
            raise ConfigError(f"{given!r} makes a {type(allocator).__name__}; a BlockAllocator has allocate and free")
        return allocator

    return make
