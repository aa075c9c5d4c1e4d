"""BlockTable: where one sequence's tokens are. Logical block i of the sequence is physical block ``block_ids[i]``."""

from __future__ import annotations

from collections.abc import Iterable


class BlockTable:
    """The map from logical to physical blocks of one sequence. Blocks are appended, replaced by a copy, or cut off its end.

    Token ``position`` lives in slot ``block_ids[position // block_size] * block_size + position % block_size``.
    """

    __slots__ = ("block_ids", "block_size")

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.block_ids: list[int] = []

    @property
    def capacity(self) -> int:
        """Tokens that the blocks so far have room for."""
        return len(self.block_ids) * self.block_size

    def blocks_missing(self, num_tokens: int) -> int:
        """Blocks to append before ``num_tokens`` tokens (of the whole sequence) have room."""
        return max(0, -(-num_tokens // self.block_size) - len(self.block_ids))

    def append(self, block_ids: Iterable[int]) -> None:
        """Add blocks at the end."""
        self.block_ids.extend(block_ids)

    def replace(self, index: int, block_id: int) -> None:
        """Put another block in a place of the table: a copy that is the sequence's own."""
        self.block_ids[index] = block_id

    def cut(self, num_blocks: int) -> list[int]:
        """Keep the first ``num_blocks`` blocks. Returns the others, the last one first."""
        rest, self.block_ids = self.block_ids[num_blocks:], self.block_ids[:num_blocks]
        return rest[::-1]

    def slot(self, position: int) -> int:
        """The token slot of a position, in the flat numbering of the whole cache."""
        return self.block_ids[position // self.block_size] * self.block_size + position % self.block_size
