"""The attention layer of Llama: project, turn by position, store keys and values in the cache, attend, project back.

What other families do differently are choices of :class:`ModelConfig`, one line each: biases (Qwen2), norms of queries and
keys (Qwen3), a window (Mistral).
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from refimpl.attention.backend import AttentionStep
from refimpl.cache.kv_cache import LayerKV
from refimpl.config import ModelConfig
from refimpl.layers.linear import new_bias
from refimpl.layers.norm import HeadNorms
from refimpl.layers.rotary import Rotation, TableRotation, rotate
from refimpl.quantization.method import Destination, LinearMethod, Rows
from refimpl.ranks import ALONE, Ranks


class Attention(nn.Module):
    """Grouped-query attention (Ainslie et al. 2023) over the paged cache; Q, K and V are one fused matrix.

    ``window`` is how many tokens one attends to, itself the last of them (Beltagy et al. 2020, "Longformer"); None: all.
    Where several ranks hold the model, ``config`` names this rank's heads, and what all heads add up to is summed over them.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        method: LinearMethod,
        window: int | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        super().__init__()
        self.window = window
        self.ranks = ranks
        self.num_heads = config.num_attention_heads
        self.num_kv_heads = config.num_key_value_heads
        self.head_dim = config.head_dim
        self.q_size = self.num_heads * self.head_dim
        self.kv_size = self.num_kv_heads * self.head_dim
        self.qkv_proj = method.linear(config.hidden_size, self.q_size + 2 * self.kv_size, dtype, device)
        self.o_proj = method.linear(self.q_size, config.hidden_size, dtype, device)
        self.qkv_bias = new_bias(self.q_size + 2 * self.kv_size, dtype, device) if config.qkv_bias else None
        self.o_bias = new_bias(config.hidden_size, dtype, device) if config.output_bias else None
        self.norms = HeadNorms(self.num_heads, self.head_dim, config.rms_norm_eps, dtype, device) if config.qk_norm else None

    def forward(
        self,
        x: Rows,
        rotation: Rotation | TableRotation,
        layer_kv: LayerKV,
        attention: AttentionStep,
    ) -> Float[Tensor, "T H"]:
        """Attention of this step's tokens over all tokens of their own sequences up to themselves."""
        projected = self.qkv_proj(x)
        if self.qkv_bias is not None:
            projected.add_(self.qkv_bias)
        heads = projected.view(len(projected), self.num_heads + 2 * self.num_kv_heads, self.head_dim)
        if self.norms is not None:
            self.norms(heads[:, : self.num_heads + self.num_kv_heads])
        query = self._turn_and_write(heads, rotation, layer_kv, attention)
        window = () if self.window is None else (self.window,)  # a backend of one's own need not know of windows
        output = self.ranks.all_reduce(self.o_proj(attention.attend(layer_kv, query, *window).flatten(1)))
        return output if self.o_bias is None else output.add_(self.o_bias)

    def checkpoint_views(self) -> dict[str, Destination]:
        """Where each tensor of a checkpoint's ``self_attn`` goes."""
        sizes = (self.q_size, self.kv_size, self.kv_size)
        [query, key, value], [output] = self.qkv_proj.parts(*sizes), self.o_proj.parts()
        views: dict[str, Destination] = {
            "q_proj.weight": query,
            "k_proj.weight": key,
            "v_proj.weight": value,
            "o_proj.weight": output,
        }
        if self.qkv_bias is not None:
            views |= zip(("q_proj.bias", "k_proj.bias", "v_proj.bias"), self.qkv_bias.split(sizes), strict=True)
        if self.o_bias is not None:
            views["o_proj.bias"] = self.o_bias
        if self.norms is not None:
            views |= {"q_norm.weight": self.norms.query.weight, "k_norm.weight": self.norms.key.weight}
        return views

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
        whole = getattr(attention, "turn_and_write_heads", None)
        if whole is not None and isinstance(rotation, Rotation):
            turned_query: Tensor | None = whole(layer_kv, heads, self.num_heads, rotation.cos, rotation.signed_sin)
            if turned_query is not None:
                return turned_query
        num_turning = self.num_heads + self.num_kv_heads
        stored = layer_kv.k.dtype
        turned = rotate(heads[:, :num_turning], rotation).to(stored)
        attention.write(layer_kv, turned[:, self.num_heads :], heads[:, num_turning:].to(stored))
        return turned[:, : self.num_heads]
