"""AWQ's two searches for one layer's matrices: the scales of input channels, and how far each group's range is clipped.

A weight is rounded to 16 levels between the least and the largest of its group. Rounding errors count as much as the
activations that they are multiplied with, so channels of large activations are scaled up before the rounding, and their
activations down (Lin et al. 2023, "AWQ: Activation-aware Weight Quantization", section 3.2)::

    s = mean|x|^α            α from 0 (round to nearest) to 1, by the least error of the outputs

Clipping a group's range makes its steps finer and its largest weights wrong; the best is found in the same way.

The error of the outputs is ``E‖(Ŵ − W) x‖² = Σ_rows δᵀ H δ`` with ``H = E[x xᵀ]``: however many the calibration tokens, no
more than H is kept of them. All of H counts, so that the errors of different channels and groups may make up for each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from refimpl.quantization.awq_layout import LARGEST, float16_above_0
from refimpl.quantize.groups import Group

ALPHAS = tuple(i / 20 for i in range(21))
SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65)
"""Shares of a group's range."""
ROWS = 512
"""Outputs of a group of matrices by which scales are compared, evenly spaced: more would not decide otherwise."""


@dataclass
class Statistics:
    """What is kept of a matrix' inputs over the calibration tokens."""

    gram: Float[Tensor, "C C"]
    """Σ x xᵀ."""
    absolute: Float[Tensor, "C"]
    """Σ |x|."""
    tokens: int = 0

    @classmethod
    def empty(cls, channels: int, device: torch.device) -> Statistics:
        """Of no token."""
        return cls(torch.zeros(channels, channels, device=device), torch.zeros(channels, device=device))

    def add(self, x: Float[Tensor, "T C"]) -> None:
        """Count more tokens' inputs."""
        wide = x.float()
        self.gram.addmm_(wide.T, wide)
        self.absolute.add_(wide.abs().sum(0))
        self.tokens += len(x)

    @property
    def mean_absolute(self) -> Float[Tensor, "C"]:
        """Mean |x| of each channel."""
        return self.absolute / max(self.tokens, 1)

    def scaled(self, scales: Float[Tensor, "C"]) -> Float[Tensor, "C C"]:
        """E[x xᵀ] of inputs that are divided by ``scales``."""
        return self.gram / max(self.tokens, 1) / scales.unsqueeze(0) / scales.unsqueeze(1)


def rounded(weight: Float[Tensor, "O C"], group_size: int) -> Float[Tensor, "O C"]:
    """A matrix rounded to 16 levels a group of input channels.

    The numbers of :func:`refimpl.quantization.awq_layout.quantise_groups`, without transposing the matrix to integers and
    back: a search rounds one dozens of times.
    """
    groups = weight.unflatten(1, (-1, group_size))
    least, most = groups.amin(-1, keepdim=True).clamp(max=0), groups.amax(-1, keepdim=True).clamp(min=0)
    scales = float16_above_0((most - least) / LARGEST).to(weight.dtype)
    zeros = (-least / scales).round_().clamp_(0, LARGEST)
    levels = (groups / scales).round_().clamp_(-zeros, LARGEST - zeros)
    result: Tensor = levels.mul_(scales).flatten(1)
    return result


def output_error(difference: Float[Tensor, "O C"], gram: Float[Tensor, "C C"]) -> Float[Tensor, ""]:
    """``Σ_rows δᵀ H δ``: the mean squared error of the outputs, summed over them."""
    return (difference @ gram).mul_(difference).sum()


def channel_scales(mean_absolute: Float[Tensor, "B"], alpha: float) -> Float[Tensor, "B"]:
    """``mean|x|^α``, about 1 in the middle: the geometric mean of the least and the largest is 1."""
    scales = mean_absolute.clamp(min=1e-4).pow(alpha)
    return scales / (scales.max() * scales.min()).sqrt()


@dataclass(frozen=True)
class Chosen:
    """A group's scales, and what they bring."""

    alpha: float
    scales: Float[Tensor, "B"]
    error: float
    """Of the outputs, as a share of what rounding without scales makes."""


def search_scales(
    group: Group,
    weights: Sequence[Float[Tensor, "_ C"]],
    statistics: Statistics,
    group_size: int,
    alphas: Sequence[float] = ALPHAS,
) -> Chosen:
    """The scales, among those of ``alphas``, of the least error of all outputs of the group's matrices together."""
    means = group.gathered(statistics.mean_absolute)
    stacked = torch.cat(list(weights))
    stacked = stacked[:: max(1, len(stacked) // ROWS)]
    gram = statistics.scaled(torch.ones_like(statistics.absolute))
    errors = []
    for alpha in alphas:
        spread = group.spread(channel_scales(means, alpha))
        difference = rounded(stacked * spread, group_size).div_(spread).sub_(stacked)
        errors.append(float(output_error(difference, gram)))
    best = min(range(len(alphas)), key=errors.__getitem__)
    plain = float(output_error(rounded(stacked, group_size).sub_(stacked), gram))
    return Chosen(alphas[best], channel_scales(means, alphas[best]), errors[best] / plain if plain else 1.0)


def clip(
    weight: Float[Tensor, "O C"],
    gram: Float[Tensor, "C C"],
    group_size: int,
    shrinks: Sequence[float] = SHRINKS,
) -> Float[Tensor, "O C"]:
    """The matrix with each row's groups clamped to that share of their range at which the outputs' error is least.

    Groups are taken one after the other: the range of each is chosen beside the errors that the others make at that time.
    """
    original = weight.split(group_size, dim=1)
    clamped = list(original)
    errors = rounded(weight, group_size).sub_(weight)
    for number, values in enumerate(original):
        columns = slice(number * group_size, (number + 1) * group_size)
        own = gram[columns, columns]
        others = errors @ gram[:, columns] - errors[:, columns] @ own
        clamped[number], errors[:, columns] = _best_range(values, own, others, shrinks)
    return torch.cat(clamped, dim=1)


def _best_range(
    values: Float[Tensor, "O G"], own: Float[Tensor, "G G"], others: Float[Tensor, "O G"], shrinks: Sequence[float]
) -> tuple[Float[Tensor, "O G"], Float[Tensor, "O G"]]:
    """One group of every row, clamped to its best range, and its rounding errors there.

    ``others`` is what the errors of other groups bring to the gradient: the error is ``δᵀ H δ + 2 δᵀ others``.
    """
    low, high = values.amin(1, keepdim=True), values.amax(1, keepdim=True)
    best, best_error, best_difference = values, None, torch.zeros_like(values)
    for shrink in shrinks:
        candidate = values.clamp(low * shrink, high * shrink)
        difference = rounded(candidate, values.shape[1]).sub_(values)
        error = (difference @ own).add_(others, alpha=2).mul_(difference).sum(1, keepdim=True)
        if best_error is None:
            best_error, best, best_difference = error, candidate, difference
            continue
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        best = torch.where(better, candidate, best)
        best_difference = torch.where(better, difference, best_difference)
    return best, best_difference
