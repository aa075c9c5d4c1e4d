"""Rotary embedding: a token's position turns its queries and keys, so that their products see relative distance.

:func:`refimpl.kernels.reference.rotary` is the definition. Here the two halves of a head are an axis of their own, so that
one product, one flip and one multiply-add turn all heads of a step, queries and keys alike::

    [a, b] · cos + [b, a] · [−sin, sin]  =  [a cos − b sin, b cos + a sin]
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from refimpl.kernels.by_triton import by_triton
from refimpl.rope_config import RopeConfig


@dataclass(frozen=True)
class Rotation:
    """How a step's tokens are turned, the same in all layers; ``half = D / 2``."""

    cos: Float[Tensor, "T 1 1 half"]
    signed_sin: Float[Tensor, "T 1 2 half"]
    """The sines with the sign of the half that they are added to."""


@dataclass(frozen=True)
class TableRotation:
    """The same for a kernel, which reads the angles of its token from the tables itself."""

    positions: Int[Tensor, "T"]
    cos: Float[Tensor, "P half"]
    sin: Float[Tensor, "P half"]


def inverse_frequencies(config: RopeConfig, head_dim: int) -> Float[Tensor, "half"]:
    """The angle that each pair of dimensions turns by a position: ``f_i = theta^(-2i / D)``, rescaled by the configuration.

    linear (Chen et al. 2023, position interpolation): ``f / factor``. The other kinds change low frequencies more:

    dynamic (NTK-aware scaling by length): the base becomes ``theta · (factor · L / original - (factor - 1))^(D / (D - 2))``
    for a context of L tokens. transformers takes the length so far for L and turns all keys anew when it grows; a cache
    holds keys that are turned already, and one sequence's base must not change under it, nor differ from that of another
    that shares its blocks. So L is fixed for the engine: the original context by default (there the base is theta itself,
    as in transformers), or the ``max_model_len`` that was asked for: what transformers computes for a text of that
    length, and at ``factor · original`` tokens what vLLM always computes.

    yarn (Peng et al. 2023, sections 3.2 and 3.3): dimensions that turn more than ``beta_fast`` times over the original
    context are left, those of fewer than ``beta_slow`` turns are divided by ``factor``, and those between are blended.

    llama3 (Llama 3.1, Dubey et al. 2024): the same by wavelength: those beyond ``original / low_freq_factor`` are slowed
    by ``factor``, those within ``original / high_freq_factor`` are left, and between them the two are blended.
    """
    theta = config.theta
    if config.kind == "dynamic":
        length = max(config.context_length or 0, config.original_max_position_embeddings)
        stretch = config.factor * length / config.original_max_position_embeddings - (config.factor - 1)
        theta *= stretch ** (head_dim / (head_dim - 2))
    frequencies = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
    if config.frequency_divisors:
        frequencies = frequencies / torch.tensor(config.frequency_divisors)
    if config.kind == "linear":
        return frequencies / config.factor
    if config.kind == "yarn":
        kept = _yarn_share_kept(config, head_dim)
    elif config.kind == "llama3":
        turns = config.original_max_position_embeddings * frequencies / (2 * math.pi)  # over the original context
        kept = (turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
        kept = kept.clamp(0, 1)
    else:
        return frequencies
    return (1 - kept) * frequencies / config.factor + kept * frequencies


def _yarn_share_kept(config: RopeConfig, head_dim: int) -> Float[Tensor, "half"]:
    """How much of each frequency is left as it is: 1 up to the dimension of ``beta_fast`` turns, 0 from ``beta_slow`` on."""

    def dimension(turns: float) -> float:
        """The (fractional) pair of dimensions that turns so often over the original context."""
        wavelength = config.original_max_position_embeddings / turns
        return head_dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(config.theta))

    low, high = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low or 0.001  # where both borders fall on one dimension: a step
    return 1 - ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)


class RotaryEmbedding(nn.Module):
    """The cosines and sines of every position, worked out once, times yarn's ``attention_factor``."""

    def __init__(
        self, config: RopeConfig, head_dim: int, max_positions: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        # Angles up to 10⁵ need the digits of float32 even for 16-bit models; cosines and sines are then rounded.
        wide = torch.promote_types(dtype, torch.float32)
        frequencies = inverse_frequencies(config, head_dim).to(wide)
        angles = torch.arange(max_positions, dtype=wide)[:, None] * frequencies
        self.register_buffer("cos", (angles.cos() * config.attention_factor).to(dtype).to(device), persistent=False)
        self.register_buffer("sin", (angles.sin() * config.attention_factor).to(dtype).to(device), persistent=False)
        self.cos: Tensor
        self.sin: Tensor

    def forward(self, positions: Int[Tensor, "T"], dtype: torch.dtype | None = None) -> Rotation | TableRotation:
        """The rotation of a step's tokens, which all layers share; to be computed in ``dtype``, or in at least float32."""
        if by_triton(self.cos):
            return TableRotation(positions, self.cos, self.sin)
        dtype = dtype or torch.promote_types(self.cos.dtype, torch.float32)
        cos, sin = self.cos[positions].to(dtype), self.sin[positions].to(dtype)
        return Rotation(cos[:, None, None], torch.stack((-sin, sin), dim=1).unsqueeze(1))


def rotate(x: Float[Tensor, "T heads D"], rotation: Rotation | TableRotation) -> Float[Tensor, "T heads D"]:
    """Turn every head of each token by the token's rotation."""
    if isinstance(rotation, TableRotation):
        from refimpl.kernels.rotary import rotary

        return rotary(x, rotation.positions, rotation.cos, rotation.sin)
    tokens, heads, head_dim = x.shape
    halves = x.view(tokens, heads, 2, head_dim // 2)
    turned = torch.addcmul(halves * rotation.cos, halves.flip(-2), rotation.signed_sin)
    return turned.view(x.shape).to(x.dtype)
