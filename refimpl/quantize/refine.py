"""The last search: which of its levels a weight takes, and how far levels lie apart. It need not be the nearest level.

The rounding error of one channel can make up for that of another where the two are active together. A first choice is made
with that in mind (:mod:`refimpl.quantize.feedback`). Then each weight in turn takes the level at which the error of the
outputs ``δᵀ H δ`` is least, given all others (coordinate descent; Behdin et al. 2023, "QuantEase"): the level nearest to
``w_j − Σ_{k ≠ j} H_jk δ_k / H_jj``; and the scales are fitted to the levels
(:mod:`refimpl.quantize.steps`). Zero points stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from refimpl.quantization.awq_layout import LARGEST
from refimpl.quantize.feedback import rounded_in_turn
from refimpl.quantize.steps import fitted_scales

SWEEPS = 3
"""Times that every weight is looked at, before scales are fitted and after each fit."""
FITS = 2
"""Times that scales are fitted to the levels."""
CHANNELS_AT_ONCE = 64
"""Input channels between which the error's gradient is kept up to date; to the others it is carried in one product."""
DAMPING = 0.25
"""Of the mean square of the activations, added to each channel's, however many tokens were seen: other texts than those go
otherwise. Found on SmolLM2-135M, calibrated on its own texts and measured on a novel: 0.01 and 1 lose more."""


def damping_for(channels: int, tokens: int) -> float:
    """What is added when H comes of so many tokens: few of them say more of what goes together than is true.

    Errors of levels are driven into the directions in which H is least, which are those of which it knows least.
    """
    return DAMPING + channels / tokens


@dataclass(frozen=True)
class Levels:
    """A matrix in 4 bits, as :func:`refimpl.quantization.awq_layout.quantise_groups` gives it."""

    values: UInt8[Tensor, "C O"]
    zeros: UInt8[Tensor, "groups O"]
    scales: Float[Tensor, "groups O"]

    @property
    def group_size(self) -> int:
        """Input channels that share a scale."""
        return len(self.values) // len(self.zeros)

    def split(self, sizes: Sequence[int]) -> list[Levels]:
        """Matrices of so many outputs each, which lie one behind the other."""
        parts = (tensor.split(list(sizes), dim=1) for tensor in (self.values, self.zeros, self.scales))
        return [Levels(*(part.contiguous() for part in matrix)) for matrix in zip(*parts, strict=True)]

    def widened(self) -> Float[Tensor, "O C"]:
        """The matrix that they stand for, in float32."""
        signed = self.values.float() - self.zeros.float().repeat_interleave(self.group_size, 0)
        return signed.mul_(self.scales.float().repeat_interleave(self.group_size, 0)).T


def refine(
    weight: Float[Tensor, "O C"],
    nearest: Levels,
    gram: Float[Tensor, "C C"],
    sweeps: int = SWEEPS,
    fits: int = FITS,
    damping: float = DAMPING,
) -> Levels:
    """Better values than the nearest ones, and better scales, of the same zero points.

    Args:
        weight: what is to be approached.
        nearest: the scales and zero points to begin with.
        gram: E[x xᵀ] of the inputs.
        sweeps: see :data:`SWEEPS`.
        fits: see :data:`FITS`.
        damping: see :func:`damping_for`.

    """
    added = damping * gram.diagonal().mean()
    gram = gram + torch.diag(added.expand(len(gram)).clamp(min=1e-12))
    descent = _Descent(nearest, weight.dtype)
    descent.start(rounded_in_turn(weight, descent.steps, descent.zeros, gram))
    _sweep(descent, weight, gram, sweeps)
    scales = nearest.scales
    for _ in range(fits):
        scales = fitted_scales(weight, descent.signed, scales, gram)
        descent.rescale(scales)
        _sweep(descent, weight, gram, sweeps)
    return Levels(descent.values(), nearest.zeros, scales)


def _sweep(descent: _Descent, weight: Float[Tensor, "O C"], gram: Float[Tensor, "C C"], sweeps: int) -> None:
    """Look at every weight so many times."""
    gradient = gram @ (descent.signed * descent.steps - weight.T)
    for _ in range(sweeps):
        for start in range(0, len(gram), CHANNELS_AT_ONCE):
            block = slice(start, start + CHANNELS_AT_ONCE)
            change = descent.descend(block, gradient[block].clone(), gram[block, block])
            gradient.addmm_(gram[:, block], change)


class _Descent:
    """The levels while they change, as distances from the zero point."""

    def __init__(self, levels: Levels, dtype: torch.dtype) -> None:
        self._group_size = levels.group_size
        self.zeros = levels.zeros.to(dtype).repeat_interleave(self._group_size, 0)
        self.rescale(levels.scales)
        self.start(levels.values)

    def start(self, values: UInt8[Tensor, "C O"]) -> None:
        """Take other levels."""
        self.signed = values.to(self.zeros.dtype).sub_(self.zeros)

    def rescale(self, scales: Float[Tensor, "groups O"]) -> None:
        """Take other scales."""
        self.steps = scales.to(self.zeros.dtype).repeat_interleave(self._group_size, 0)

    def descend(self, block: slice, gradient: Float[Tensor, "B O"], gram: Float[Tensor, "B B"]) -> Float[Tensor, "B O"]:
        """Move the levels of some channels, one channel after the other; gives the change of their errors."""
        signed, steps, zeros = self.signed[block], self.steps[block], self.zeros[block]
        before = signed.clone()
        for channel, row in enumerate(gram):
            best = signed[channel] - gradient[channel] / (row[channel] * steps[channel])
            best = best.round_().clamp_(-zeros[channel], LARGEST - zeros[channel])
            gradient.addr_(row, (best - signed[channel]) * steps[channel])
            signed[channel] = best
        return (signed - before).mul_(steps)

    def values(self) -> UInt8[Tensor, "C O"]:
        """The levels from 0 to 15."""
        return (self.signed + self.zeros).to(torch.uint8)
