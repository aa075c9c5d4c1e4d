"""Llama (Touvron et al. 2023; Dubey et al. 2024), written to be read: one flat batch of tokens, no padding, no phases.

Families that differ from it by choices of :class:`ModelConfig` alone run as it does (see :mod:`refimpl.models.family`).

::

    token ids [T] ─ embedding ─► x ─┬─ norm ─ attention ─►(+)─┬─ norm ─ SwiGLU ─►(+)─ … every layer … ─ norm ─► hidden [T, H]
                                    └─────────────────────►┘  └────────────────►┘                                │
                                                                         logits [R, V] ◄─ lm_head ◄─ rows that draw ◄┘
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from refimpl.attention.backend import AttentionStep
from refimpl.cache.kv_cache import LayerKV
from refimpl.config import ModelConfig
from refimpl.layers.activation import SwiGLU
from refimpl.layers.attention import Attention
from refimpl.layers.linear import MOST_BYTES_TWICE, Linear
from refimpl.layers.norm import RMSNorm
from refimpl.layers.rotary import RotaryEmbedding, Rotation, TableRotation
from refimpl.layers.vocabulary import Vocabulary
from refimpl.model_shares import share_of
from refimpl.models.cuts import cut_views
from refimpl.models.family import Family, Keys
from refimpl.quantization.awq import AwqLinear
from refimpl.quantization.method import Destination, LinearMethod
from refimpl.quantization.plain import PLAIN
from refimpl.ranks import ALONE, Ranks


class LlamaLayer(nn.Module):
    """One transformer layer: attention and feed-forward, each behind a norm and around a residual."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        activations: torch.dtype,
        device: torch.device,
        method: LinearMethod,
        window: int | None,
        ranks: Ranks,
    ) -> None:
        super().__init__()
        self.method = method
        self.input_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, activations, device)
        self.attention = Attention(config, dtype, device, method, window, ranks)
        self.post_attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, activations, device)
        self.mlp = SwiGLU(config.hidden_size, config.intermediate_size, dtype, device, method, config.mlp_bias, ranks)

    def forward(
        self,
        x: Float[Tensor, "T H"],
        residual: Float[Tensor, "T H"] | None,
        rotation: Rotation | TableRotation,
        layer_kv: LayerKV,
        attention: AttentionStep,
    ) -> tuple[Float[Tensor, "T H"], Float[Tensor, "T H"]]:
        """What this layer adds, and the residual stream that it is added to: each sum is made by the norm that follows it.

        The first layer has no ``residual``.
        """
        normed, residual = self.method.normed(self.input_norm, x, residual)
        x = self.attention(normed, rotation, layer_kv, attention)
        normed, residual = self.method.normed(self.post_attention_norm, x, residual)
        return self.mlp(normed), residual

    def checkpoint_views(self) -> dict[str, Destination]:
        """Where each tensor of a checkpoint's layer goes."""
        attention, mlp = self.attention.checkpoint_views(), self.mlp.checkpoint_views()
        return {
            "input_layernorm.weight": self.input_norm.weight,
            **{f"self_attn.{name}": view for name, view in attention.items()},
            "post_attention_layernorm.weight": self.post_attention_norm.weight,
            **{f"mlp.{name}": view for name, view in mlp.items()},
        }


class LlamaForCausalLM(nn.Module):
    """The whole model, or one rank's share of it. Weights are empty until loaded through :meth:`checkpoint_views`;
    ``method`` holds the layers'.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        method: LinearMethod = PLAIN,
        ranks: Ranks = ALONE,
    ) -> None:
        super().__init__()
        self.config = config
        self.ranks = ranks
        self.share = share_of(config, ranks.size)
        """The sizes of what is held here, the cache's among them."""
        self.vocabulary = Vocabulary(config.vocab_size, ranks)
        # A CPU computes in float32: 16 bits are how weights and cache are kept there, not what lies between the products.
        self.activations = torch.promote_types(dtype, torch.float32) if device.type == "cpu" else dtype
        self.embed_tokens = nn.Parameter(
            torch.empty(self.vocabulary.rows, config.hidden_size, dtype=dtype, device=device), requires_grad=False
        )
        positions = config.context_limit(config.rope.context_length)
        self.rotary = RotaryEmbedding(config.rope, config.head_dim, positions, dtype, device)
        self.layers = nn.ModuleList(
            LlamaLayer(self.share, dtype, self.activations, device, method, config.window(index), ranks)
            for index in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, self.activations, device)
        self.lm_head = Linear(config.hidden_size, self.vocabulary.rows, dtype, device)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens
        for weight in (self.embed_tokens, self.lm_head.weight):
            weight.data[len(self.vocabulary.held) :] = 0  # rows of no token: computed, and left out of the logits

    def forward(
        self,
        input_ids: Int[Tensor, "T"],
        positions: Int[Tensor, "T"],
        kv_cache: list[LayerKV],
        attention: AttentionStep,
    ) -> Float[Tensor, "T H"]:
        """The hidden state of each token of a step, after the last norm."""
        x = self.vocabulary.embed(self.embed_tokens, input_ids, self.activations)
        residual = None
        rotation = self.rotary(positions, self.lm_head.dtype)
        for layer, layer_kv in zip(self.layers, kv_cache, strict=True):
            x, residual = layer(x, residual, rotation, layer_kv, attention)
        hidden: Tensor
        hidden, _ = self.norm(x, residual)
        return hidden

    def compute_logits(self, hidden: Float[Tensor, "R H"]) -> Float[Tensor, "R V"]:
        """Logits of the given rows, in at least float32."""
        logits = self.vocabulary.whole(self.lm_head(hidden))
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def checkpoint_views(self) -> dict[str, Destination]:
        """Where each tensor of a Hugging Face checkpoint goes: its name, and the part of our fused weight that it fills."""
        held = len(self.vocabulary.held)
        views: dict[str, Destination] = {
            "model.embed_tokens.weight": self.embed_tokens[:held],
            "model.norm.weight": self.norm.weight,
        }
        if not self.config.tie_word_embeddings:
            views["lm_head.weight"] = self.lm_head.weight[:held]
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, LlamaLayer)
            views |= {f"model.layers.{index}.{name}": view for name, view in layer.checkpoint_views().items()}
        return views if self.ranks.size == 1 else cut_views(views, self.config, self.ranks, self.embed_tokens.dtype)

    def pack_weights(self) -> None:
        """After loading: move matrices into the layout that this CPU multiplies fastest. Views are void from here on."""
        small = self.config.num_parameters * self.lm_head.dtype.itemsize <= MOST_BYTES_TWICE
        for module in list(self.modules()):
            if isinstance(module, Linear | AwqLinear):
                tied = module is self.lm_head and self.config.tie_word_embeddings
                module.pack(keep_plain=tied, twice=small)

    def release(self) -> None:
        """Give the weights' memory back now, whoever still refers to them."""
        for module in self.modules():
            if isinstance(module, Linear):
                module.release()
        for tensor in (*self.parameters(), *self.buffers()):
            tensor.untyped_storage().resize_(0)


def _choices(keys: Keys) -> dict[str, Any]:
    attention_bias = keys.flag("attention_bias")
    return {"qkv_bias": attention_bias, "output_bias": attention_bias, "mlp_bias": keys.flag("mlp_bias")}


def _written(config: ModelConfig) -> dict[str, Any]:
    return {"attention_bias": config.qkv_bias, "mlp_bias": config.mlp_bias}


LLAMA = Family("LlamaForCausalLM", "llama", _choices, _written)
