"""The model over whole texts as a function of its layers' tensors: nothing is changed in place, so it can be trained.

Hidden states are in float32, products in the dtype of their matrices. The engine's own layers compute the same, but in place
and by kernels that have no backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from refimpl.kernels.reference import norm_heads, rotary_at
from refimpl.layers.rotary import RotaryEmbedding
from refimpl.model_config import ModelConfig
from refimpl.quantize.groups import MATRICES, NORMS
from refimpl.speculate.dense import causal_attention

QUERY, KEY, VALUE, OUT, GATE, UP, DOWN = MATRICES
Layer = Mapping[str, Tensor]
"""A layer's tensors by their names in it, as ``mlp.up_proj.weight``."""


def as_they_are(x: Tensor) -> Tensor:
    """Inputs of products that are not rounded."""
    return x


class DenseModel:
    """Embedding, layers that are given, and the last norm.

    Args:
        config: of the model.
        outside: the tensors that are in no layer.
        dtype: of products.
        device: where it is computed.

    """

    def __init__(self, config: ModelConfig, outside: Layer, dtype: torch.dtype, device: torch.device) -> None:
        self.config = config
        self.embedding = outside["model.embed_tokens.weight"].to(device, dtype)
        head = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
        self.head = outside[head].to(device, dtype)
        self._norm = outside["model.norm.weight"].to(device, torch.float32)
        limit = config.max_position_embeddings
        self._rotary = RotaryEmbedding(config.rope, config.head_dim, limit, torch.float32, device)

    def hidden(
        self,
        layers: Callable[[int], Layer],
        windows: Int[Tensor, "N L"],
        inputs: Callable[[Tensor], Tensor] = as_they_are,
    ) -> Float[Tensor, "T H"]:
        """Hidden states of all tokens after the last norm, one text after the other.

        ``layers`` gives a layer's tensors, and ``inputs`` is what becomes of the inputs of their products.
        """
        hidden = F.embedding(windows.flatten(), self.embedding).float()
        for number in range(self.config.num_hidden_layers):
            hidden = self._layer(layers(number), hidden, inputs, len(windows), self.config.window(number))
        return self._normed(hidden, self._norm)

    def _normed(self, x: Float[Tensor, "T H"], weight: Float[Tensor, "H"]) -> Float[Tensor, "T H"]:
        return F.rms_norm(x, (x.shape[-1],), weight.float(), self.config.rms_norm_eps)

    def _layer(
        self,
        layer: Layer,
        hidden: Float[Tensor, "T H"],
        inputs: Callable[[Tensor], Tensor],
        texts: int,
        window: int | None,
    ) -> Float[Tensor, "T H"]:
        x = inputs(self._normed(hidden, layer[f"{NORMS[0]}.weight"]))
        hidden = hidden + _product(layer, OUT, inputs(self._attention(layer, x, texts, window))).float()
        x = inputs(self._normed(hidden, layer[f"{NORMS[1]}.weight"]))
        x = inputs(F.silu(_product(layer, GATE, x)) * _product(layer, UP, x))
        return hidden + _product(layer, DOWN, x).float()

    def _attention(self, layer: Layer, x: Float[Tensor, "T H"], texts: int, window: int | None) -> Float[Tensor, "T _"]:
        config = self.config
        query, key, value = (_product(layer, name, x).unflatten(1, (-1, config.head_dim)) for name in (QUERY, KEY, VALUE))
        turning = torch.cat((query, key), dim=1)
        if config.qk_norm:
            weights = (layer["self_attn.q_norm.weight"], layer["self_attn.k_norm.weight"])
            turning = norm_heads(turning, *weights, config.rms_norm_eps, config.num_attention_heads)
        positions = torch.arange(len(x) // texts, device=x.device).repeat(texts)
        turned = rotary_at(turning, positions, self._rotary.cos, self._rotary.sin).to(value.dtype)
        query, key = turned.split((config.num_attention_heads, config.num_key_value_heads), dim=1)
        return causal_attention(query, key, value, texts, window).flatten(1)


def _product(layer: Layer, name: str, x: Float[Tensor, "T _"]) -> Float[Tensor, "T _"]:
    weight, bias = layer[f"{name}.weight"], layer.get(f"{name}.bias")
    return F.linear(x.to(weight.dtype), weight, None if bias is None else bias.to(weight.dtype))
