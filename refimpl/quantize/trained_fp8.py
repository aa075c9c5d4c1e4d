"""E4M3 that can be trained: each weight as a number of steps, of which rounding takes the nearest that the format has.

A matrix is ``w = s · e4m3(step · u)``, with a scale s for each row that stays. Floats lie closer the smaller they are: a
weight's step is the distance of its neighbours where it begins, so that u of all weights move alike. Activations are rounded
a token at a time in the forward pass, as the engine does, so weights learn to make up for that as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from refimpl.kernels import reference
from refimpl.quantize.distil import BESIDE, Student, Training, is_matrix, product_dtype, trained
from refimpl.quantize.groups import MATRICES
from refimpl.quantize.source import Source

Fp8Matrix = tuple[Float[Tensor, "O C"], Float[Tensor, "O"]]
"""A matrix in e4m3, and its scales in float32."""
MANTISSA_BITS, LEAST_EXPONENT = 3, -6
"""Of e4m3; below 2^-6 numbers lie as close as just above it."""
LARGEST = reference.FP8_MAX + 16
"""Half a step above the largest: below it the nearest number is still one of the format."""


def steps_at(values: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """How far the numbers of e4m3 lie apart at these values."""
    exponents = torch.frexp(values).exponent - 1  # of a magnitude in [2^e, 2^(e + 1))
    exponents = torch.where(values == 0, LEAST_EXPONENT, exponents).clamp(min=LEAST_EXPONENT)
    return torch.ldexp(torch.ones_like(values), exponents - MANTISSA_BITS)


class _Rounding(torch.autograd.Function):
    """The weights that numbers stand for."""

    @staticmethod
    def forward(ctx: Any, numbers: Tensor, steps: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        """``numbers`` and ``steps`` [O, C], ``scales`` [O, 1]."""
        values = numbers * steps
        ctx.save_for_backward(steps, scales, values.abs() < LARGEST)
        return (_nearest(values) * scales).to(dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, None, None]:
        """Past the rounding, and not beyond the range."""
        steps, scales, within = ctx.saved_tensors
        return (gradients[0].float() * scales).mul_(steps).mul_(within), None, None, None


class _RoundedRows(torch.autograd.Function):
    """Activations as the engine rounds them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        values, scales = reference.quantise(x)
        return (values.to(scales.dtype) * scales.unsqueeze(-1)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Tensor:
        """Past the rounding."""
        gradient: Tensor = gradients[0]
        return gradient


def rounded_rows(x: Float[Tensor, "T C"]) -> Float[Tensor, "T C"]:
    """Each row in e4m3 by its own scale, widened again; gradients go past it."""
    rounding: Callable[[Tensor], Tensor] = _RoundedRows.apply
    return rounding(x)


class TrainedFp8:
    """A matrix in e4m3 while it is trained; begins as ``weight`` rounded to nearest."""

    def __init__(self, weight: Float[Tensor, "O C"]) -> None:
        values, scales = reference.quantise(weight)
        self._scales = scales.float().unsqueeze(1)
        nearest = values.float()
        self._steps = steps_at(nearest)
        self.numbers = torch.lerp(nearest, weight.float() / self._scales, BESIDE).div_(self._steps).requires_grad_()

    def weight(self, dtype: torch.dtype) -> Float[Tensor, "O C"]:
        """What it stands for, to be trained through."""
        rounding: Callable[..., Tensor] = _Rounding.apply
        return rounding(self.numbers, self._steps, self._scales, dtype)

    def parameters(self, training: Training) -> list[tuple[Tensor, float]]:
        """Its numbers."""
        return [(self.numbers, training.level_rate)]

    def stored(self) -> Fp8Matrix:
        """As it is stored."""
        values = _nearest(self.numbers.detach() * self._steps)
        return values.to(torch.float8_e4m3fn), self._scales.squeeze(1).clone()


def _nearest(values: Tensor) -> Tensor:
    return values.clamp(-reference.FP8_MAX, reference.FP8_MAX).to(torch.float8_e4m3fn).float()


def trained_matrices(
    source: Source,
    windows: Int[Tensor, "N L"],
    training: Training,
    device: torch.device,
    show_progress: bool = False,
) -> dict[str, Fp8Matrix]:
    """The matrices of all layers by their full names, without ``.weight``, trained."""
    count = source.config.num_hidden_layers
    names = [[f"model.layers.{number}.{name}" for name in MATRICES] for number in range(count)]
    tensors: list[dict[str, Tensor]] = [{} for _ in range(count)]
    for name, tensor in source.weights.items():
        if name.startswith("model.layers.") and not is_matrix(own := name.split(".", 3)[3]):
            tensors[int(name.split(".")[2])][own] = source.narrowed(tensor, name).to(device).float()
    matrices = [
        {own: TrainedFp8(source.weights[f"{name}.weight"].to(device)) for own, name in zip(MATRICES, layer, strict=True)}
        for layer in names
    ]
    student = Student(tensors, matrices, product_dtype(device), rounded_rows)
    best = trained(source, student, windows, training, device, show_progress)
    return {f"model.layers.{number}.{own}": one for number, layer in enumerate(best) for own, one in layer.items()}
