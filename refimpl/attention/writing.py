"""Keys and values into their slots, for the backends that read with somebody's kernel."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from refimpl.attention.backend import AttentionMetadata
from refimpl.cache.kv_cache import LayerKV


def write_slots(
    metadata: AttentionMetadata, layer_kv: LayerKV, key: Float[Tensor, "T Hkv D"], value: Float[Tensor, "T Hkv D"]
) -> None:
    """Store the new tokens' keys and values: one kernel where Triton is there. Mutates ``layer_kv``."""
    from refimpl.kernels.kv_write import write_kv

    write_kv(key, value, layer_kv.k, layer_kv.v, metadata.slot_mapping)
