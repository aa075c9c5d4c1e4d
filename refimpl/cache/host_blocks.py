"""Host blocks: the swap space's memory, and how whole blocks get there and back.

Where the cache is in the host's memory too, blocks are copied where they are (:class:`HostBlocksBeside`). On a GPU they go
over a link, beside its computing (:class:`refimpl.cache.staged_blocks.StagedBlocks`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

BLOCKS_A_RUN = 4
"""From so many blocks side by side on, a copy of its own is the cheaper (measured with 66 blocks of 24 KiB)."""


@runtime_checkable
class HostBlocks(Protocol):
    """Room for blocks of all pools in the host's memory. Block 0 is nobody's."""

    def swap_out(self, transfers: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks to the host, (device block, host block) each, in every pool."""

    def swap_in(self, transfers: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks back, (host block, device block) each, in every pool."""

    def release(self) -> None:
        """Give the memory back now, whoever still holds a reference to the tensors."""


class HostBlocksBeside:
    """The swap space of a cache that is in the host's memory itself.

    Args:
        pools: the cache, ``[blocks, B, Hkv, D]`` each.
        num_blocks: usable blocks of the swap space.

    """

    def __init__(self, pools: list[Tensor], num_blocks: int) -> None:
        self._pools = pools
        self.pools = [torch.empty(num_blocks + 1, *pool.shape[1:], dtype=pool.dtype) for pool in pools if num_blocks]

    def swap_out(self, transfers: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks to the swap space, (cache block, host block) each, in every pool."""
        _move(self._pools, self.pools, transfers)

    def swap_in(self, transfers: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks back, (host block, cache block) each, in every pool."""
        _move(self.pools, self._pools, transfers)

    def release(self) -> None:
        """Give the memory back."""
        for pool in self.pools:
            pool.untyped_storage().resize_(0)
        self.pools = []


def _move(sources: list[Tensor], targets: list[Tensor], transfers: Sequence[tuple[int, int]]) -> None:
    """Blocks that lie side by side are copied at once, unless they lie so scattered that the calls would cost more.

    Then they are gathered first, which copies everything twice.
    """
    if not transfers:
        return
    together = runs(transfers)
    if len(together) * BLOCKS_A_RUN <= len(transfers):
        for source, target in zip(sources, targets, strict=True):
            for first, goes_to, count in together:
                target[goes_to : goes_to + count] = source[first : first + count]
        return
    source_ids, target_ids = torch.tensor(transfers).unbind(1)
    for source, target in zip(sources, targets, strict=True):
        target.index_copy_(0, target_ids, source.index_select(0, source_ids))


def runs(transfers: Iterable[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Transfers (source, target) as (first source, first target, count), where both numbers go up by 1, in any order."""
    found: list[tuple[int, int, int]] = []
    for source, target in sorted(transfers):
        if found and (source, target) == (found[-1][0] + found[-1][2], found[-1][1] + found[-1][2]):
            found[-1] = (*found[-1][:2], found[-1][2] + 1)
        else:
            found.append((source, target, 1))
    return found
