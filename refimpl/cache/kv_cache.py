"""KVCache: the tensors behind the block ids, on the device and in the swap space. One pair of K and V a layer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from refimpl.config import ModelConfig
from refimpl.errors import RefimplError

BLOCKS_A_RUN = 4
"""From so many blocks side by side on, a copy of its own is the cheaper (measured with 66 blocks of 24 KiB)."""


@dataclass(frozen=True)
class LayerKV:
    """The keys and values of one layer, for all blocks. Block 0 is the null block."""

    k: Float[Tensor, "blocks B Hkv D"]
    v: Float[Tensor, "blocks B Hkv D"]


class KVCache:
    """The cache of all layers: ``num_blocks`` usable blocks of ``block_size`` token slots, and the null block.

    ``num_host_blocks`` more are in the host's memory (pinned where the device is a GPU), for sequences that are swapped out.
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
        on_host = (num_host_blocks + 1, *shape[1:])
        pinned = device.type == "cuda"
        self.host_layers = [
            LayerKV(*(torch.empty(on_host, dtype=dtype, pin_memory=pinned) for _ in "kv"))
            for _ in range(config.num_hidden_layers if num_host_blocks else 0)
        ]

    def swap_out(self, transfers: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks to the host, (device block, host block) each, in every layer."""
        self._transfer(self.layers, self.host_layers, transfers)

    def swap_in(self, transfers: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks back, (host block, device block) each, in every layer."""
        self._transfer(self.host_layers, self.layers, transfers)

    def _transfer(self, source: list[LayerKV], target: list[LayerKV], transfers: Sequence[tuple[int, int]]) -> None:
        """Over a link: gather, move as one piece, scatter, for a link is as fast as its pieces are long.

        Within the host's memory that copies everything twice: there, blocks that lie side by side are copied at once, where
        they are, unless they lie so scattered that the calls would cost more than the second copy.
        """
        if not transfers:
            return
        runs = _runs(transfers)
        if source[0].k.device == target[0].k.device and len(runs) * BLOCKS_A_RUN <= len(transfers):
            for from_layer, to_layer in zip(source, target, strict=True):
                for first, goes_to, count in runs:
                    to_layer.k[goes_to : goes_to + count] = from_layer.k[first : first + count]
                    to_layer.v[goes_to : goes_to + count] = from_layer.v[first : first + count]
            return
        source_ids, target_ids = torch.tensor(transfers).unbind(1)
        for from_layer, to_layer in zip(source, target, strict=True):
            for from_cache, to_cache in ((from_layer.k, to_layer.k), (from_layer.v, to_layer.v)):
                pieces = from_cache.index_select(0, source_ids.to(from_cache.device))
                to_cache.index_copy_(0, target_ids.to(to_cache.device), pieces.to(to_cache.device))

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        """Copy whole blocks, (source, target) each, in every layer. Targets are distinct, and none is a source."""
        if not copies:
            return
        sources, targets = torch.tensor(copies, device=self.layers[0].k.device).unbind(1)
        for layer in self.layers:
            for cache in (layer.k, layer.v):
                cache[targets] = cache[sources]

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
        for layer in (*self.layers, *self.host_layers):
            for tensor in (layer.k, layer.v):
                tensor.untyped_storage().resize_(0)
        self.layers, self.host_layers = [], []


def _runs(transfers: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Transfers (source, target) as (first source, first target, count), where both numbers go up by 1, in any order."""
    runs: list[tuple[int, int, int]] = []
    for source, target in sorted(transfers):
        if runs and (source, target) == (runs[-1][0] + runs[-1][2], runs[-1][1] + runs[-1][2]):
            runs[-1] = (*runs[-1][:2], runs[-1][2] + 1)
        else:
            runs.append((source, target, 1))
    return runs
