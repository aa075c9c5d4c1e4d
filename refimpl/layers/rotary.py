"""Rotary embedding: a token's position turns its queries and keys, so that their products see relative distance.

:func:`refimpl.kernels.reference.rotary` is the definition. Here the two halves of a head are an axis of their own, so that
one product, one flip and one multiply-add turn all heads of a step, queries and keys alike::

    [a, b] · cos + [b, a] · [−sin, sin]  =  [a cos − b sin, b cos + a sin]
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from refimpl.config import RopeConfig
from refimpl.kernels.reference import at_least_float32

Rotation = tuple[Float[Tensor, "T 1 1 half"], Float[Tensor, "T 1 2 half"]]
"""Cosines, and the sines with the sign of the half that they are added to, for a step's tokens; ``half = D / 2``."""


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

    def forward(self, positions: Int[Tensor, "T"]) -> Rotation:
        """The rotation of a step's tokens, which all layers share."""
        cos, sin = at_least_float32(self.cos[positions]), at_least_float32(self.sin[positions])
        return cos[:, None, None], torch.stack((-sin, sin), dim=1).unsqueeze(1)


def rotate(x: Float[Tensor, "T heads D"], rotation: Rotation) -> Float[Tensor, "T heads D"]:
    """Turn every head of each token by the token's rotation, computing in at least float32."""
    cos, signed_sin = rotation
    halves = x.unflatten(-1, (2, -1))
    turned: Tensor = torch.addcmul(halves * cos, halves.flip(-2), signed_sin)
    return turned.flatten(-2).to(x.dtype)
