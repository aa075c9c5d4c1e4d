"""BlockPool: the physical blocks of the KV cache, as ids. It hands them out and takes them back, and nothing else."""

from __future__ import annotations

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
        self._taken = bytearray(num_blocks + 1)

    @property
    def free_ids(self) -> tuple[int, ...]:
        """The free blocks, in order of their number. O(num_blocks)."""
        return tuple(block_id for block_id in range(1, self.num_blocks + 1) if not self._taken[block_id])

    def allocate(self, count: int) -> list[int] | None:
        """Take ``count`` blocks; None, with nothing taken, if there are not as many.

        Raises:
            AllocatorError: the allocator named other than ``count`` different free blocks. Nothing is taken then.

        """
        if count > self.num_free:
            return None
        block_ids = self._allocator.allocate(count)
        self._check(count, block_ids)
        assert block_ids is not None
        for block_id in block_ids:
            self._taken[block_id] = 1
        self.num_free -= count
        return list(block_ids)

    def free(self, block_ids: Iterable[int]) -> None:
        """Give blocks back. They may be handed out at once: the device works in order, so old reads come first."""
        given_back = list(block_ids)
        for block_id in given_back:
            assert self._taken[block_id], f"block {block_id} is freed twice"
            self._taken[block_id] = 0
        self.num_free += len(given_back)
        if given_back:
            self._allocator.free(given_back)

    def _check(self, count: int, block_ids: list[int] | None) -> None:
        """See that an allocator's answer can be followed."""
        name = getattr(self._allocator, "name", type(self._allocator).__name__)
        if not isinstance(block_ids, list | tuple) or len(block_ids) != count:
            given = f"{len(block_ids)} blocks" if isinstance(block_ids, list | tuple) else repr(block_ids)
            raise AllocatorError(
                f"the block allocator {name!r} was asked for {count} of {self.num_free} free blocks and gave {given}; it "
                "must give a list of exactly as many as it is asked for, while there are as many"
            )
        for place, block_id in enumerate(block_ids):
            if not isinstance(block_id, int) or not 1 <= block_id <= self.num_blocks:
                raise AllocatorError(
                    f"the block allocator {name!r} gave block {block_id!r}; blocks are 1 to {self.num_blocks}, and 0 is the "
                    "null block, which nobody gets"
                )
            if self._taken[block_id] or block_id in block_ids[:place]:
                raise AllocatorError(
                    f"the block allocator {name!r} gave block {block_id} twice: it is not free until it is given back"
                )
