"""Rotary embedding: a token's position turns its queries and keys, so that their products see relative distance."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from refimpl.config import RopeConfig


def inverse_frequencies(config: RopeConfig, head_dim: int) -> Float[Tensor, "half"]:
    """The angle that each pair of dimensions turns by a position: ``theta^(-2i / D)``, rescaled by the configuration.

    llama3 scaling (Llama 3.1, section "long context" of Dubey et al. 2024): wavelengths beyond
    ``original / low_freq_factor`` are slowed by ``factor``, those within ``original / high_freq_factor`` are left, and
    between them the two are blended.
    """
    frequencies = 1.0 / config.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
    if config.frequency_divisors:
        return frequencies / torch.tensor(config.frequency_divisors)
    if config.kind == "default":
        return frequencies
    turns = config.original_max_position_embeddings * frequencies / (2 * math.pi)  # over the original context
    blend = (turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    blend = blend.clamp(0, 1)
    return (1 - blend) * frequencies / config.factor + blend * frequencies


class RotaryEmbedding(nn.Module):
    """The cosines and sines of every position, worked out once."""

    def __init__(
        self, config: RopeConfig, head_dim: int, max_positions: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        # Angles up to 10⁵ need the digits of float32 even for 16-bit models; cosines and sines are then rounded.
        wide = torch.promote_types(dtype, torch.float32)
        frequencies = inverse_frequencies(config, head_dim).to(wide)
        angles = torch.arange(max_positions, dtype=wide)[:, None] * frequencies
        self.register_buffer("cos", angles.cos().to(dtype).to(device), persistent=False)
        self.register_buffer("sin", angles.sin().to(dtype).to(device), persistent=False)
        self.cos: Tensor
        self.sin: Tensor

    def forward(self, positions: Int[Tensor, "T"]) -> tuple[Float[Tensor, "T half"], Float[Tensor, "T half"]]:
        """Cosines and sines for a step's tokens, ``half = D / 2``."""
        return self.cos[positions], self.sin[positions]
