"""StoredTensor: one of several tensors of which a quantised checkpoint makes a matrix, and where it goes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from refimpl.errors import CheckpointError
from refimpl.quantization.method import Destination
from refimpl.quantization_config import QuantizationConfig

WEIGHT = ".weight"


@dataclass(frozen=True)
class StoredTensor:
    """A :class:`Destination` for a tensor of its own dtype and one of several shapes."""

    shapes: tuple[tuple[int, ...], ...]
    """Those that it may have."""
    dtypes: tuple[torch.dtype, ...]
    device: torch.device
    take: Callable[[Tensor], None]
    """Bring a tensor of such a shape and dtype, from any device, to its place."""
    optional: bool = False
    """Whether a checkpoint may lack it."""
    outputs: tuple[int, int] | None = None
    """The axis along which the matrix's outputs lie, and how many an element holds; None where it is the same for all."""
    inputs: tuple[int, int] | None = None
    """The same for the inputs."""

    @property
    def shape(self) -> torch.Size:
        """The usual one."""
        return torch.Size(self.shapes[0])

    def copy_(self, source: Tensor, /) -> None:
        """Take it over."""
        self.take(source)

    def normal_(self, mean: float, std: float, /, *, generator: torch.Generator | None = None) -> None:
        """Never: random numbers are a whole matrix's.

        Raises:
            TypeError: always.

        """
        raise TypeError("a part of a matrix that is made of several tensors is not filled alone")

    def of_whole(self, dim: int, start: int, full: int) -> StoredTensor:
        """Where the tensor of a larger matrix goes, of which this is a part: outputs (``dim`` 0) or inputs (1) from
        ``start`` on, of ``full``.

        Raises:
            CheckpointError: the part begins within an element, or ends there.

        """
        along = (self.outputs, self.inputs)[dim]
        if along is None:
            return self
        axis, each = along
        count, whole = self.shapes[0][axis], full // each
        if start % each or full % each:
            what = ("outputs", "inputs")[dim]
            raise CheckpointError(f"a part of a quantised matrix begins at {start} of {full} {what}, which go by {each}")

        def take(source: Tensor) -> None:
            is_cut = source.dim() > axis and source.shape[axis] == whole
            self.take(source.narrow(axis, start // each, count) if is_cut else source)

        shapes = tuple(
            (*shape[:axis], whole, *shape[axis + 1 :]) if len(shape) > axis and shape[axis] == count else shape
            for shape in self.shapes
        )
        return replace(self, shapes=shapes, take=take)


@runtime_checkable
class MadeOfSeveral(Protocol):
    """A destination that a quantised checkpoint fills by several tensors."""

    def stored(self, config: QuantizationConfig, name: str) -> Mapping[str, StoredTensor]:
        """They, by the last part of their names; ``name`` is the matrix's, for messages."""


def stored_views(views: Mapping[str, Destination], config: QuantizationConfig | None) -> dict[str, Destination]:
    """Where each tensor of a checkpoint goes, where it is quantised: ``X.weight`` gives way to ``X.qweight`` and others.

    What is held as it is stays as it is.
    """
    found: dict[str, Destination] = {}
    for name, view in views.items():
        if config is not None and isinstance(view, MadeOfSeveral):
            module = name.removesuffix(WEIGHT)
            found |= {f"{module}.{suffix}": part for suffix, part in view.stored(config, module).items()}
        else:
            found[name] = view
    return found


def is_optional(view: Destination) -> bool:
    """Whether a checkpoint may lack what fills a view."""
    return isinstance(view, StoredTensor) and view.optional


def has_its_shape(view: Destination, tensor: Tensor) -> bool:
    """Whether a tensor is of a shape that a view takes."""
    return tuple(tensor.shape) in view.shapes if isinstance(view, StoredTensor) else view.shape == tensor.shape


def wanted_dtype(view: Destination, tensor: Tensor) -> str:
    """What dtype a view wants of a tensor whose own it does not take; empty where it takes it.

    A plain view takes floats of 16 bits and more: those of 8 mean nothing without a scale, which belongs to another tensor.
    """
    if isinstance(view, StoredTensor):
        return "" if tensor.dtype in view.dtypes else " or ".join(str(dtype)[6:] for dtype in view.dtypes)
    return "" if tensor.is_floating_point() and tensor.element_size() > 1 else "a float type of 16 bits or more"


def check_finite(name: str, scales: Tensor) -> None:
    """See that scales are numbers.

    Raises:
        CheckpointError: one is not.

    """
    if not bool(scales.isfinite().all()):
        raise CheckpointError(f"{name} holds infinite numbers or NaN; download the checkpoint again")
