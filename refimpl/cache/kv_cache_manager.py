"""KVCacheManager: the one door to the blocks. Each call does all of what it says, or changes nothing."""

from __future__ import annotations

from collections.abc import Mapping

from refimpl.cache.auditor import Snapshot
from refimpl.cache.block_pool import BlockPool
from refimpl.cache.block_table import BlockTable


class KVCacheManager:
    """Gives sequences the blocks that their tokens need, on demand, and takes them back at once.

    A sequence wastes at most ``block_size - 1`` slots, in its last block.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self._tables: dict[int, BlockTable] = {}

    @property
    def num_blocks(self) -> int:
        """Usable blocks (the null block is one more)."""
        return self.pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks that could be handed out now."""
        return self.pool.num_free

    @property
    def capacity(self) -> int:
        """Tokens that the empty cache holds."""
        return self.num_blocks * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that a sequence of ``num_tokens`` tokens takes."""
        return -(-num_tokens // self.block_size)

    def num_blocks_of(self, sequence_id: int) -> int:
        """Blocks in a sequence's table; 0 if it has none."""
        table = self._tables.get(sequence_id)
        return len(table.block_ids) if table else 0

    def blocks_missing(self, sequence_id: int, num_tokens: int) -> int:
        """Blocks that ``allocate`` would have to take from the pool."""
        return max(0, self.blocks_for(num_tokens) - self.num_blocks_of(sequence_id))

    def allocate(self, sequence_id: int, num_tokens: int) -> list[int] | None:
        """Make room for the first ``num_tokens`` tokens of a sequence.

        Returns the blocks appended to its table (often none), or None, with nothing changed, if the pool has too few.
        """
        table = self._tables.get(sequence_id)
        missing = table.blocks_missing(num_tokens) if table else self.blocks_for(num_tokens)
        if table and not missing:
            return []
        block_ids = self.pool.allocate(missing)
        if block_ids is None:
            return None
        if table is None:
            table = self._tables[sequence_id] = BlockTable(self.block_size)
        table.append(block_ids)
        return block_ids

    def free(self, sequence_id: int) -> list[int]:
        """Take back all blocks of a sequence (last block first) and forget its table. Returns the blocks."""
        table = self._tables.pop(sequence_id, None)
        if table is None:
            return []
        block_ids = table.block_ids[::-1]
        self.pool.free(block_ids)
        return block_ids

    def snapshot(self, num_computed_tokens: Mapping[int, int]) -> Snapshot:
        """The state as the auditor reads it; the argument says how far each running sequence is computed."""
        return Snapshot(
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            free_ids=self.pool.free_ids,
            tables={sequence_id: tuple(table.block_ids) for sequence_id, table in self._tables.items()},
            num_computed_tokens=dict(num_computed_tokens),
        )
