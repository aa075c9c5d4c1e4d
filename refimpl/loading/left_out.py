"""What a quantised checkpoint leaves in 16 bits, beside embeddings and head: whole matrices of some layers."""

from __future__ import annotations

import torch
from torch import nn

from refimpl.config import ModelConfig
from refimpl.layers.linear import Linear
from refimpl.quantization.awq import AwqLinear

OURS = (("attention", "qkv_proj"), ("attention", "o_proj"), ("mlp", "gate_up_proj"), ("mlp", "down_proj"))
"""Where a layer has the matrices of ``quantization_config.MATRICES``."""


def leave_out(model: nn.Module, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
    """Put plain matrices in place of those that the checkpoint does not quantise. Mutates the model."""
    if config.quantization is None:
        return
    for layer, place, _ in config.quantization.left_matrices(config.num_hidden_layers):
        part, name = OURS[place]
        holder = model.get_submodule(f"layers.{layer}.{part}")
        matrix = getattr(holder, name)
        assert isinstance(matrix, AwqLinear), "others are refused when the method is chosen"
        setattr(holder, name, Linear(matrix.in_features, matrix.out_features, dtype, device))
