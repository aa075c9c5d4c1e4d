"""BlockPool: the physical blocks of the KV cache, as ids. It hands them out and takes them back, and nothing else."""

from __future__ import annotations

import operator
from collections.abc import Iterable

from refimpl.cache.allocators import BlockAllocator, FirstFreedFirst
from refimpl.errors import AllocatorError

NULL_BLOCK = 0
"""The block that no sequence owns: padded rows of block tables point there. It is in no count that users see."""


class BlockPool:
    """Ids ``1 … num_blocks``, each free or taken. Which of the free ones is next, the allocator says; its answer is checked.

    Kwon et al. 2023, "Efficient Memory Management for Large Language Model Serving with PagedAttention", section 4.
    """

    def __init__(self, num_blocks: int, allocator: BlockAllocator | None = None) -> None:
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        """Blocks that nobody has."""
        self._allocator = allocator or FirstFreedFirst(num_blocks)
        self._name: str = getattr(self._allocator, "name", type(self._allocator).__name__)
        self._failure: AllocatorError | None = None
        self._taken = bytearray(num_blocks + 1)

    @property
    def free_ids(self) -> tuple[int, ...]:
        """The free blocks, in order of their number. O(num_blocks)."""
        return tuple(block_id for block_id in range(1, self.num_blocks + 1) if not self._taken[block_id])

    def allocate(self, count: int) -> list[int] | None:
        """Take ``count`` blocks; None, with nothing taken, if there are not as many.

        Raises:
            AllocatorError: the allocator raised, or named other than ``count`` different free blocks. Nothing is taken then.

        """
        if count > self.num_free:
            return None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        try:
            answer = self._allocator.allocate(count)
        except Exception as error:
            raise AllocatorError(
                f"the block allocator {self._name!r} raised {error!r} when asked for {count} blocks"
            ) from error
        block_ids = self._marked(count, answer)
        if block_ids is None:
            block_ids = self._checked(count, answer)
            for block_id in block_ids:
                self._taken[block_id] = 1
        self.num_free -= count
        return block_ids

    def _marked(self, count: int, answer: object) -> list[int] | None:
        """An answer whose blocks are marked as taken, if all is plainly right with it; else None, and nothing is marked."""
        if type(answer) is not list or len(answer) != count:
            return None
        taken, last = self._taken, self.num_blocks
        for index, block_id in enumerate(answer):
            if type(block_id) is not int or not 1 <= block_id <= last or taken[block_id]:
                for marked in answer[:index]:
                    taken[marked] = 0
                return None
            taken[block_id] = 1
        return answer.copy()

    def free(self, block_ids: Iterable[int]) -> None:
        """Give blocks back. They may be handed out at once: the device works in order, so old reads come first.

        An allocator that raises here is told of at the next ``allocate``: whoever gives back is done with its blocks.
        """
        given_back = list(block_ids)
        for block_id in given_back:
            assert self._taken[block_id], f"block {block_id} is freed twice"
            self._taken[block_id] = 0
        self.num_free += len(given_back)
        if given_back:
            self._give_back(given_back)

    def _give_back(self, block_ids: list[int]) -> None:
        try:
            self._allocator.free(block_ids)
        except Exception as error:
            self._failure = AllocatorError(
                f"the block allocator {self._name!r} raised {error!r} when blocks {block_ids} were given back"
            )
            self._failure.__cause__ = error

    def _checked(self, count: int, answer: object) -> list[int]:
        """An allocator's answer, if it can be followed. Of one that cannot, the allocator gets back what it may have."""
        block_ids, wrong = list(answer) if isinstance(answer, list | tuple) else [], ""
        if not isinstance(answer, list | tuple) or len(block_ids) != count:
            given = f"{len(block_ids)} blocks" if isinstance(answer, list | tuple) else repr(answer)
            wrong = (
                f"was asked for {count} of {self.num_free} free blocks and gave {given}; it must give a list of exactly as "
                "many as it is asked for, while there are as many"
            )
        good: dict[int, None] = {}  # in order, and quick to ask
        for given in block_ids:
            block_id = _whole(given)
            if block_id is None or not 1 <= block_id <= self.num_blocks:
                wrong = wrong or (
                    f"gave block {given!r}; blocks are whole numbers, 1 to {self.num_blocks}, and 0 is the null block, "
                    "which nobody gets"
                )
            elif self._taken[block_id] or block_id in good:
                wrong = wrong or f"gave block {block_id} twice: it is not free until it is given back"
            else:
                good[block_id] = None
        if wrong:
            self._give_back(list(good))
            raise AllocatorError(f"the block allocator {self._name!r} {wrong}")
        return list(good)


def _whole(given: object) -> int | None:
    """A whole number, numpy's too; None for anything else. True is no block."""
    try:
        return None if isinstance(given, bool) else operator.index(given)  # type: ignore[arg-type]
    except TypeError:
        return None
