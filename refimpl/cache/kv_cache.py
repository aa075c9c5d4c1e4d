"""KVCache: the tensors behind the block ids, on the device and in the swap space. One pair of K and V a layer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from refimpl.cache.block_moves import BlockMoves, ids_on, moves_of
from refimpl.cache.host_blocks import HostBlocks, HostBlocksBeside
from refimpl.cache.staged_blocks import PinnedBlocks
from refimpl.config import ModelConfig
from refimpl.errors import RefimplError


@dataclass(frozen=True)
class LayerKV:
    """The keys and values of one layer, for all blocks. Block 0 is the null block."""

    k: Float[Tensor, "blocks B Hkv D"]
    v: Float[Tensor, "blocks B Hkv D"]


class KVCache:
    """The cache of all layers: ``num_blocks`` usable blocks of ``block_size`` token slots, and the null block.

    ``num_host_blocks`` more are in the host's memory, for sequences that are swapped out.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        num_host_blocks: int = 0,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        shape = (num_blocks + 1, block_size, config.num_key_value_heads, config.head_dim)
        # Not cleared: attention never reads a slot that its sequence did not write. On a CPU the system hands a page out
        # when it is first written, so an unused block costs nothing.
        self.layers = [
            LayerKV(k=torch.empty(shape, dtype=dtype, device=device), v=torch.empty(shape, dtype=dtype, device=device))
            for _ in range(config.num_hidden_layers)
        ]
        pools = [pool for layer in self.layers for pool in (layer.k, layer.v)]
        self._moves = moves_of(pools)
        self.host_blocks = host_blocks_of(pools, self._moves, num_host_blocks)

    def swap_out(self, transfers: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks to the host, (device block, host block) each, in every layer."""
        self.host_blocks.swap_out(transfers)

    def swap_in(self, transfers: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks back, (host block, device block) each, in every layer."""
        self.host_blocks.swap_in(transfers)

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, (source, target) each, in every layer. Targets are distinct, and none is a source."""
        if copies:
            sources, targets = (ids_on(self.layers[0].k.device, ids) for ids in zip(*copies, strict=True))
            self._moves.copy(sources, targets)

    def read(self, layer: int, block_ids: Iterable[int]) -> LayerKV:
        """Copies of what some blocks hold in a layer; all of them from 0 on are the whole cache, slot by slot.

        Raises:
            RefimplError: there is no such layer or block.

        """
        wanted = list(block_ids)
        if layer not in range(len(self.layers)):
            raise RefimplError(f"layer {layer} does not exist; the model has layers 0 to {len(self.layers) - 1}")
        if wrong := [block for block in wanted if block not in range(self.num_blocks + 1)]:
            raise RefimplError(
                f"block {wrong[0]} does not exist; the cache has blocks 1 to {self.num_blocks}, and 0 for nobody"
            )
        return LayerKV(self.layers[layer].k[wanted], self.layers[layer].v[wanted])

    def release(self) -> None:
        """Give the memory back now, whoever still holds a reference to the tensors."""
        self.host_blocks.release()
        for layer in self.layers:
            for tensor in (layer.k, layer.v):
                tensor.untyped_storage().resize_(0)
        self.layers = []


def host_blocks_of(pools: list[Tensor], moves: BlockMoves, num_host_blocks: int) -> HostBlocks:
    """The swap space of a cache, by where the cache is."""
    if num_host_blocks and pools[0].is_cuda:
        return PinnedBlocks(pools, moves, num_host_blocks)
    return HostBlocksBeside(pools, num_host_blocks)
