"""LinearMethod: what a way of holding weights must answer. A new one is a file beside fp8.py and a line in choose.py.

Only the matrices of the layers ask it. Embeddings, norms and the output head stay in the model's dtype: of the first a row
is read a token, norms are small, and what the head rounds goes straight into the tokens' probabilities.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from refimpl.config import ModelConfig
from refimpl.kernels.transfer import pieces_on
from refimpl.layers.norm import RMSNorm


class Quantised(NamedTuple):
    """Rows of activations as ``values · scales``."""

    values: Float[Tensor, "T C"]
    """In e4m3."""
    scales: Float[Tensor, "T"]


Rows = Tensor | Quantised
"""A product's input: as it is, or quantised already by whatever made it."""


@runtime_checkable
class Destination(Protocol):
    """Where a tensor of a checkpoint goes: a part of a weight as it is held. A plain tensor is one."""

    @property
    def shape(self) -> torch.Size:
        """Of the tensor that fills it."""

    @property
    def device(self) -> torch.device:
        """Where it is held."""

    def copy_(self, source: Tensor, /) -> object:
        """Take over a tensor of that shape, in any float dtype and from any device.

        A checkpoint's tensors may be views of a mapped file: of ``source[a:b]`` no other rows are read. A destination that
        keeps a part passes it on by :func:`fill`.
        """

    def normal_(self, mean: float, std: float, /, *, generator: torch.Generator | None = None) -> object:
        """Fill it with random numbers of a normal distribution."""


def fill(view: Destination, source: Tensor) -> None:
    """Give a destination its tensor, or the part of one that it is: ``view.copy_(source)``, and to a GPU by way of
    pinned memory, a piece at a time. Mutates the view.
    """
    if not isinstance(view, Tensor) or source.ndim == 0:
        view.copy_(source)
    else:
        for rows, piece in pieces_on(source, view.device):
            view[rows].copy_(piece)


@runtime_checkable
class Matrix(Protocol):
    """A matrix ``[out_features, in_features]`` without bias, however it is held."""

    def __call__(self, x: Rows) -> Float[Tensor, "T out_features"]:
        """``x Wᵀ``."""

    def parts(self, *sizes: int) -> Sequence[Destination]:
        """The matrix in pieces of so many outputs each; without sizes, in one."""


@runtime_checkable
class LinearMethod(Protocol):
    """How matrices are held, and in which form what lies between them is handed from one to the next."""

    @property
    def name(self) -> str:
        """What people call it: ``EngineArgs.quantization``, or the empty string."""

    def linear(self, in_features: int, out_features: int, dtype: torch.dtype, device: torch.device) -> Matrix:
        """An empty matrix of a model that computes in ``dtype``."""

    def normed(
        self, norm: RMSNorm, x: Float[Tensor, "T H"], residual: Float[Tensor, "T H"] | None
    ) -> tuple[Rows, Float[Tensor, "T H"]]:
        """``norm(x, residual)``, the first of the two in the form that a matrix takes fastest."""

    def gated(self, gate_up: Matrix, x: Rows) -> Rows:
        """``silu(gate(x)) · up(x)`` in that form; ``gate_up`` is gate's matrix above up's."""

    def weight_bytes(self, in_features: int, out_features: int, bytes_per_value: int) -> int:
        """What such a matrix takes in memory, in a model of so many bytes a value."""

    def bytes_of_any_dtype(self, in_features: int, out_features: int) -> int:
        """The part of it that is the same whatever the model's dtype."""


def weight_bytes(model: ModelConfig, method: LinearMethod, bytes_per_value: int) -> int:
    """What a whole model's weights take in memory, with the matrices that its checkpoint leaves in 16 bits."""
    matrices = sum(method.weight_bytes(inputs, outputs, bytes_per_value) for outputs, inputs in model.layer_matrices)
    more = sum(
        outputs * inputs * bytes_per_value - method.weight_bytes(inputs, outputs, bytes_per_value)
        for outputs, inputs in _left(model)
    )
    return model.num_hidden_layers * matrices + more + model.num_outside_matrices * bytes_per_value


def bytes_of_any_dtype(model: ModelConfig, method: LinearMethod) -> int:
    """The part of it that another dtype would not change."""
    each = sum(method.bytes_of_any_dtype(inputs, outputs) for outputs, inputs in model.layer_matrices)
    left = sum(method.bytes_of_any_dtype(inputs, outputs) for outputs, inputs in _left(model))
    return model.num_hidden_layers * each - left


def _left(model: ModelConfig) -> list[tuple[int, int]]:
    """(outputs, inputs) of every matrix of a layer that is not quantised."""
    if model.quantization is None:
        return []
    return [model.layer_matrices[place] for _, place, _ in model.quantization.left_matrices(model.num_hidden_layers)]
