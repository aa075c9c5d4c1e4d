"""The baseline before paging: one contiguous reservation of the longest possible context for each sequence.

Same door, same auditor, same scheduler; only how blocks are given out differs. What a sequence will not use is lost to all
others while it runs (waste inside), and a rest of the pool too short for a reservation is lost for good (waste outside).
"""

from __future__ import annotations

import heapq

from refimpl.cache.kv_cache_manager import NOTHING_NEW, Allocation, KVCacheManager


class ConsecutiveRuns:
    """A BlockAllocator of runs of equal length: the first free one is next."""

    name = "consecutive_runs"

    def __init__(self, num_blocks: int, run: int) -> None:
        self._run = run
        self._starts = list(range(1, num_blocks - run + 2, run))

    def allocate(self, count: int) -> list[int] | None:
        """One run; the manager asks for nothing else."""
        if count != self._run or not self._starts:
            return None
        start = heapq.heappop(self._starts)
        return list(range(start, start + count))

    def free(self, block_ids: list[int]) -> None:
        """A run, whole."""
        heapq.heappush(self._starts, min(block_ids))


class ContiguousKVCacheManager(KVCacheManager):
    """Reserves ``max_model_len`` tokens for each sequence when it is admitted. Nothing is shared, nothing is cached."""

    can_share = False

    def __init__(self, num_blocks: int, block_size: int, max_model_len: int) -> None:
        self._run = -(-max_model_len // block_size)
        super().__init__(num_blocks, block_size, allocator=ConsecutiveRuns(num_blocks, self._run))
        self.reserved_blocks = self._run

    @property
    def num_free_blocks(self) -> int:
        """Blocks that could be handed out now: those of whole free runs."""
        return self.pool.num_free - self.num_stranded_blocks

    @property
    def num_stranded_blocks(self) -> int:
        """The rest of the pool, too short for a reservation."""
        return self.num_blocks % self._run

    def blocks_for(self, num_tokens: int) -> int:
        """A reservation, however long the sequence is."""
        return self._run

    def blocks_to_keep(self, share: float) -> int:
        """None: no running sequence grows beyond its reservation."""
        return 0

    def allocate(self, sequence_id: int, num_computed_tokens: int, num_tokens: int) -> Allocation | None:
        """The reservation has room; without one, it is made."""
        return NOTHING_NEW if sequence_id in self._tables else self.admit(sequence_id, num_tokens)

    def fork(self, parent_id: int, child_id: int) -> tuple[int, ...]:
        """Not possible: the scheduler looks at ``can_share``, and lets the child compute its prompt anew."""
        raise AssertionError("a contiguous reservation cannot be shared")
