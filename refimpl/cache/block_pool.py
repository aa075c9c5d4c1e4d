"""BlockPool: the physical blocks of the KV cache, as ids. It hands them out and takes them back, and nothing else."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

NULL_BLOCK = 0
"""The block that no sequence owns: padded rows of block tables point there. It is in no count that users see."""


class BlockPool:
    """Ids ``1 … num_blocks``, each free or taken. First freed, first reused.

    Kwon et al. 2023, "Efficient Memory Management for Large Language Model Serving with PagedAttention", section 4.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = deque(range(1, num_blocks + 1))
        self._taken = bytearray(num_blocks + 1)

    @property
    def num_free(self) -> int:
        """Blocks that nobody has."""
        return len(self._free)

    @property
    def free_ids(self) -> tuple[int, ...]:
        """The free blocks, next one first."""
        return tuple(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """Take ``count`` blocks; None, with nothing taken, if there are not as many."""
        if count > len(self._free):
            return None
        block_ids = [self._free.popleft() for _ in range(count)]
        for block_id in block_ids:
            self._taken[block_id] = 1
        return block_ids

    def free(self, block_ids: Iterable[int]) -> None:
        """Give blocks back. They may be handed out at once: the device works in order, so old reads come first."""
        for block_id in block_ids:
            assert self._taken[block_id], f"block {block_id} is freed twice"
            self._taken[block_id] = 0
            self._free.append(block_id)
