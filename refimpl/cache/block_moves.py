"""Whole blocks moved in all pools of a cache at once: from block to block, and between blocks and a buffer.

On a GPU each is one launch of a kernel for all layers (:class:`refimpl.kernels.kv_blocks.BlockPools`), elsewhere plain
torch, pool by pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int32
from torch import Tensor

from refimpl.kernels.by_triton import by_triton
from refimpl.kernels.transfer import to_device


@runtime_checkable
class BlockMoves(Protocol):
    """What can be done with the blocks of a cache's pools, all ``[blocks, B, Hkv, D]``."""

    def copy(self, sources: Int32[Tensor, "n"], targets: Int32[Tensor, "n"]) -> None:
        """Copy blocks to blocks in every pool. Targets are distinct, and none is a source."""

    def gather(self, block_ids: Int32[Tensor, "n"], staging: Float[Tensor, "n pools B Hkv D"]) -> None:
        """Copy blocks of every pool into a buffer, block by block."""

    def scatter(self, block_ids: Int32[Tensor, "n"], staging: Float[Tensor, "n pools B Hkv D"]) -> None:
        """Copy a buffer into blocks, which are distinct, of every pool."""


@dataclass(frozen=True)
class PlainMoves:
    """The same without a kernel."""

    pools: tuple[Tensor, ...]

    def copy(self, sources: Int32[Tensor, "n"], targets: Int32[Tensor, "n"]) -> None:
        """Copy blocks to blocks in every pool."""
        for pool in self.pools:
            pool.index_copy_(0, targets.long(), pool.index_select(0, sources))

    def gather(self, block_ids: Int32[Tensor, "n"], staging: Float[Tensor, "n pools B Hkv D"]) -> None:
        """Copy blocks of every pool into a buffer."""
        for number, pool in enumerate(self.pools):
            staging[:, number] = pool.index_select(0, block_ids)

    def scatter(self, block_ids: Int32[Tensor, "n"], staging: Float[Tensor, "n pools B Hkv D"]) -> None:
        """Copy a buffer into blocks of every pool."""
        for number, pool in enumerate(self.pools):
            pool.index_copy_(0, block_ids.long(), staging[:, number])


def ids_on(device: torch.device, block_ids: Sequence[int]) -> Int32[Tensor, "n"]:
    """Block ids where moves read them. Nobody waits for the device."""
    return to_device(torch.tensor(block_ids, dtype=torch.int32), device)


def moves_of(pools: list[Tensor]) -> BlockMoves:
    """The moves of these pools, by the kernels where they run."""
    if by_triton(pools[0]):
        from refimpl.kernels.kv_blocks import BlockPools

        return BlockPools.of(pools)
    return PlainMoves(tuple(pools))
