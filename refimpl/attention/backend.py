"""What an attention backend is, and what it is told about a step. Argument names are flash-attn's."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int, Int32, Int64
from torch import Tensor

from refimpl.cache.kv_cache import LayerKV
from refimpl.kernels.transfer import array_to_device

LEAST_FOR_PREFILL = 80
"""The compute capability from which Triton's products run on tensor cores, which a prefill needs."""


@dataclass(frozen=True)
class AttentionMetadata:
    """Who attends to what in one step. Sequence s has ``query_lens[s]`` new tokens, the last of ``context_lens[s]``.

    The lengths are told twice: to the host, which shapes a step, and on the device, where kernels read them.
    """

    query_lens: list[int]
    """New tokens of each sequence."""
    context_lens: list[int]
    """Context of each sequence, the new tokens included. Where a CUDA graph is captured, the longest it may have."""
    block_size: int
    block_table: Int[Tensor, "S max_blocks"]
    slot_mapping: Int[Tensor, "T"]
    """Where each new token's key and value go: ``block_id * B + offset``."""
    cu_seqlens_q: Int32[Tensor, "S_plus_1"]
    """Where each sequence's new tokens begin in the flat batch; the last is T."""
    seqused_k: Int32[Tensor, "S"]
    """``context_lens`` on the device."""

    @classmethod
    def of(
        cls,
        query_lens: list[int],
        context_lens: list[int],
        block_size: int,
        block_table: Int[Tensor, "S max_blocks"],
        slot_mapping: Int[Tensor, "T"],
    ) -> AttentionMetadata:
        """The metadata of these lengths; the device gets both in one transfer."""
        device, S = block_table.device, len(query_lens)
        aligned = -(-S // 4) * 4  # 16 bytes: Triton compiles anew for a pointer that is less
        lengths = np.zeros(aligned + S + 1, dtype=np.int32)
        lengths[:S] = context_lens
        np.cumsum(query_lens, out=lengths[aligned + 1 :])
        packed = array_to_device(lengths, device)
        return cls(
            query_lens, context_lens, block_size, block_table, slot_mapping,
            cu_seqlens_q=packed[aligned:], seqused_k=packed[:S],
        )  # fmt: skip

    def with_contexts(self, seqused_k: Int64[Tensor, "S"]) -> AttentionMetadata:
        """The same, with lengths that the device knows better than the host, whose own are bounds."""
        return replace(self, seqused_k=seqused_k.int())

    @property
    def max_seqlen_q(self) -> int:
        """The most new tokens of a sequence."""
        return max(self.query_lens)

    @property
    def max_seqlen_k(self) -> int:
        """The longest context."""
        return max(self.context_lens)


@runtime_checkable
class AttentionStep(Protocol):
    """A backend made ready for one step: every layer uses the same one.

    One that has a kernel for it may also offer ``turn_and_write(layer_kv, query, key, value, positions, cos, sin)``: turn
    queries and keys by their tokens' positions, write keys and values, give the queries back. It is called in place of
    :meth:`write`, which else gets keys that are turned already. On a CPU, where a step's angles are looked up once for all
    layers, it is ``turn_and_write_heads(layer_kv, heads, num_heads, cos, signed_sin)``, which may give None and leave it
    undone.
    """

    def write(self, layer_kv: LayerKV, key: Float[Tensor, "T Hkv D"], value: Float[Tensor, "T Hkv D"]) -> None:
        """Store the new tokens' keys and values in the cache."""

    def attend(
        self, layer_kv: LayerKV, query: Float[Tensor, "T Hq D"], window: int | None = None
    ) -> Float[Tensor, "T Hq D"]:
        """Attention of each new token over its sequence's tokens up to itself, or over the last ``window`` of them."""


@runtime_checkable
class AttentionBackend(Protocol):
    """A way to compute attention over the paged cache.

    One with an attribute ``serves_windows`` that is true has steps whose ``attend`` takes a window; it is given one in those
    layers alone that have one. Without the attribute a model with such layers is refused.
    """

    name: str

    def begin_step(self, metadata: AttentionMetadata) -> AttentionStep:
        """Work out what all layers of a step share."""


@runtime_checkable
class RecordsPrompts(Protocol):
    """A backend whose steps with prompts a CUDA graph may hold: their attention is cut into tiles by the host beforehand."""

    prompts_on_device: bool
    """Whether it does so on this device."""

    def queries_a_tile(self, head_dim: int, dtype: torch.dtype) -> int:
        """New tokens of a sequence that are a tile."""

    def cut_prompts(
        self, head_dim: int, dtype: torch.dtype, query_lens: list[int], context_lens: list[int]
    ) -> list[tuple[int, int]]:
        """(sequence, first new token) of each tile, of the sequences with more than one new token."""

    def begin_recorded(self, metadata: AttentionMetadata, tiles: Int[Tensor, "tiles 2"]) -> AttentionStep:
        """A step of which the host knows bounds alone. Tiles of a sequence without new tokens write nothing."""
