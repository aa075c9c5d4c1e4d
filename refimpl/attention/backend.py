"""What an attention backend is, and what it is told about a step. Argument names are flash-attn's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from jaxtyping import Float, Int
from torch import Tensor

from refimpl.cache.kv_cache import LayerKV


@dataclass(frozen=True)
class AttentionMetadata:
    """Who attends to what in one step. Sequence s has ``query_lens[s]`` new tokens, the last of ``seqused_k[s]``."""

    query_lens: list[int]
    """New tokens of each sequence."""
    seqused_k: list[int]
    """Context of each sequence, the new tokens included."""
    block_size: int
    block_table: Int[Tensor, "S max_blocks"]
    slot_mapping: Int[Tensor, "T"]
    """Where each new token's key and value go: ``block_id * B + offset``."""


@runtime_checkable
class AttentionStep(Protocol):
    """A backend made ready for one step: every layer uses the same one."""

    def write(self, layer_kv: LayerKV, key: Float[Tensor, "T Hkv D"], value: Float[Tensor, "T Hkv D"]) -> None:
        """Store the new tokens' keys and values in the cache."""

    def attend(self, layer_kv: LayerKV, query: Float[Tensor, "T Hq D"]) -> Float[Tensor, "T Hq D"]:
        """Attention of each new token over its sequence's tokens up to itself."""


@runtime_checkable
class AttentionBackend(Protocol):
    """A way to compute attention over the paged cache."""

    name: str

    def begin_step(self, metadata: AttentionMetadata) -> AttentionStep:
        """Work out what all layers of a step share."""
