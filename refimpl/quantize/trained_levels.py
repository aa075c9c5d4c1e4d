"""4 bits that can be trained: scales, and levels as numbers between levels::

    w = s · (clamp(round(u) + z, 0, 15) − z)        z, the zero point, stays

u counts levels, and s changes by shares of itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from refimpl.quantization.awq_layout import LARGEST, float16_above_0
from refimpl.quantize.distil import BESIDE, Student, Training, is_matrix, product_dtype, trained
from refimpl.quantize.refine import Levels
from refimpl.quantize.report import LayerReport
from refimpl.quantize.source import Source


@dataclass(frozen=True)
class QuantisedLayer:
    """A layer in 4 bits, before it is written."""

    report: LayerReport
    tensors: dict[str, Tensor]
    """In float32, scales folded in; matrices as they were before they were rounded."""
    levels: dict[str, Levels]
    """Of each matrix, by its name in the layer."""


class _Rounding(torch.autograd.Function):
    """The weights that numbers and scales stand for."""

    @staticmethod
    def forward(ctx: Any, numbers: Tensor, scales: Tensor, zeros: Tensor, dtype: torch.dtype) -> Tensor:
        """``numbers`` [O, groups, size], ``scales`` and ``zeros`` [O, groups, 1]; gives [O, C]."""
        nearest = numbers.round()
        levels = torch.clamp(nearest, -zeros, LARGEST - zeros)
        ctx.save_for_backward(levels.to(torch.int8), scales, levels == nearest)
        return (levels * scales).flatten(1).to(dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, Tensor, None, None]:
        """Past the rounding, and not beyond the range."""
        levels, scales, within = ctx.saved_tensors
        gradient = gradients[0].view(levels.shape).float()
        numbers = (gradient * scales).mul_(within) if ctx.needs_input_grad[0] else None
        return numbers, (gradient * levels).sum(-1, keepdim=True), None, None


class TrainedLevels:
    """A matrix in 4 bits while it is trained.

    Args:
        levels: to begin with.
        weight: what they stand for, as it was before the rounding.

    """

    def __init__(self, levels: Levels, weight: Float[Tensor, "O C"]) -> None:
        self._zeros = levels.zeros.T.float().unsqueeze(2)
        self._first = levels.scales.T.float().unsqueeze(2)
        signed = levels.values.T.float().unflatten(1, (-1, levels.group_size)) - self._zeros
        missing = (weight.float().view_as(signed) / self._first - signed).clamp_(-0.5, 0.5)
        self.numbers = (signed + BESIDE * missing).requires_grad_()
        self.growth = torch.zeros_like(self._first).requires_grad_()

    def weight(self, dtype: torch.dtype) -> Float[Tensor, "O C"]:
        """What it stands for, to be trained through."""
        rounding: Callable[..., Tensor] = _Rounding.apply
        return rounding(self.numbers, self._first * (1 + self.growth), self._zeros, dtype)

    def parameters(self, training: Training) -> list[tuple[Tensor, float]]:
        """Scales, and levels where they are trained."""
        self.numbers.requires_grad_(training.level_rate > 0)
        numbers = [(self.numbers, training.level_rate)] if training.level_rate > 0 else []
        return [(self.growth, training.scale_rate), *numbers]

    def stored(self) -> Levels:
        """As it is stored."""
        signed = torch.clamp(self.numbers.detach().round(), -self._zeros, LARGEST - self._zeros)
        values = (signed + self._zeros).flatten(1).T.to(torch.uint8).contiguous()
        scales = float16_above_0((self._first * (1 + self.growth.detach())).squeeze(2).T).contiguous()
        return Levels(values, self._zeros.squeeze(2).T.to(torch.uint8).contiguous(), scales)


def trained_layers(
    source: Source,
    layers: Sequence[QuantisedLayer],
    windows: Int[Tensor, "N L"],
    training: Training,
    device: torch.device,
    show_progress: bool = False,
) -> list[QuantisedLayer]:
    """The layers with better levels and scales."""
    norms = [
        {name: source.narrowed(tensor, name).float() for name, tensor in layer.tensors.items() if not is_matrix(name)}
        for layer in layers
    ]
    matrices = [
        {name: TrainedLevels(levels, layer.tensors[f"{name}.weight"]) for name, levels in layer.levels.items()}
        for layer in layers
    ]
    student = Student(norms, matrices, product_dtype(device))
    best = trained(source, student, windows, training, device, show_progress)
    return [dataclasses.replace(layer, levels=levels) for layer, levels in zip(layers, best, strict=True)]
