"""The attention layer of Llama: project, turn by position, store keys and values in the cache, attend, project back."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from refimpl.attention.backend import AttentionStep
from refimpl.cache.kv_cache import LayerKV
from refimpl.config import ModelConfig
from refimpl.layers.rotary import Rotation, TableRotation, rotate
from refimpl.quantization.method import LinearMethod, Rows
from refimpl.ranks import ALONE, Ranks


class Attention(nn.Module):
    """Grouped-query attention (Ainslie et al. 2023) over the paged cache; Q, K and V are one fused matrix.

    Where several ranks hold the model, ``config`` names this rank's heads, and what all heads add up to is summed over them.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        method: LinearMethod,
        ranks: Ranks = ALONE,
    ) -> None:
        super().__init__()
        self.ranks = ranks
        self.num_heads = config.num_attention_heads
        self.num_kv_heads = config.num_key_value_heads
        self.head_dim = config.head_dim
        self.q_size = self.num_heads * self.head_dim
        self.kv_size = self.num_kv_heads * self.head_dim
        self.qkv_proj = method.linear(config.hidden_size, self.q_size + 2 * self.kv_size, dtype, device)
        self.o_proj = method.linear(self.q_size, config.hidden_size, dtype, device)

    def forward(
        self,
        x: Rows,
        rotation: Rotation | TableRotation,
        layer_kv: LayerKV,
        attention: AttentionStep,
    ) -> Float[Tensor, "T H"]:
        """Attention of this step's tokens over all tokens of their own sequences up to themselves."""
        projected = self.qkv_proj(x)
        heads = projected.view(len(projected), self.num_heads + 2 * self.num_kv_heads, self.head_dim)
        query = self._turn_and_write(heads, rotation, layer_kv, attention)
        return self.ranks.all_reduce(self.o_proj(attention.attend(layer_kv, query).flatten(1)))

    def _turn_and_write(
        self,
        heads: Float[Tensor, "T heads D"],
        rotation: Rotation | TableRotation,
        layer_kv: LayerKV,
        attention: AttentionStep,
    ) -> Float[Tensor, "T Hq D"]:
        """Turn queries and keys, and store keys and values; by one launch where the backend has one. Gives the queries."""
        fused = getattr(attention, "turn_and_write", None)
        if fused is not None and isinstance(rotation, TableRotation):
            parts = heads.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=1)
            query: Tensor = fused(layer_kv, *parts, rotation.positions, rotation.cos, rotation.sin)
            return query
        num_turning = self.num_heads + self.num_kv_heads
        stored = layer_kv.k.dtype
        turned = rotate(heads[:, :num_turning], rotation).to(stored)
        attention.write(layer_kv, turned[:, self.num_heads :], heads[:, num_turning:].to(stored))
        return turned[:, : self.num_heads]
