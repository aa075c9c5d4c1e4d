"""Slice: rows or columns of a full tensor, where a rank holds only these. A rank reads no more of a checkpoint than them."""

from __future__ import annotations

import torch
from torch import Tensor

from refimpl.quantization.awq_part import AwqPart
from refimpl.quantization.method import Destination, fill
from refimpl.quantization.stored import MadeOfSeveral, StoredTensor
from refimpl.quantization_config import QuantizationConfig


class Slice:
    """A :class:`Destination` for a whole tensor of a checkpoint, of which the rows (``dim`` 0) or columns from ``start`` on
    go to ``inner``; as many as that has.

    Args:
        inner: where they go.
        dim: which axis is cut.
        start: the first that is taken.
        full: how many the whole tensor has.
        dtype: the model's; random numbers are drawn in it.

    """

    def __init__(self, inner: Destination, dim: int, start: int, full: int, dtype: torch.dtype) -> None:
        self._inner, self._dim, self._start, self._full, self._dtype = inner, dim, start, full, dtype
        sizes = list(inner.shape)
        self._count, sizes[dim] = sizes[dim], full
        self._shape = torch.Size(sizes)

    @property
    def shape(self) -> torch.Size:
        """Of the whole tensor."""
        return self._shape

    @property
    def device(self) -> torch.device:
        """Where the slice is held."""
        return self._inner.device

    def copy_(self, source: Tensor, /) -> None:
        """Take the slice over; the rest of a tensor that is mapped from a file is not read."""
        fill(self._inner, source.narrow(self._dim, self._start, self._count))

    def normal_(self, mean: float, std: float, /, *, generator: torch.Generator | None = None) -> None:
        """The slice of the random numbers that would fill a whole tensor: the same model on any number of ranks."""
        whole = torch.empty(self._shape, dtype=self._dtype, device=self.device)
        self.copy_(whole.normal_(mean, std, generator=generator))


class SliceOfSeveral(Slice):
    """A slice of a matrix that is not held in a tensor of its own dtype: a quantised checkpoint has several for it."""

    def stored(self, config: QuantizationConfig, name: str) -> dict[str, StoredTensor]:
        """They, of each of which this rank's share is taken."""
        assert isinstance(self._inner, MadeOfSeveral)
        parts = self._inner.stored(config, name)
        return {suffix: part.of_whole(self._dim, self._start, self._full) for suffix, part in parts.items()}

    def normal_(self, mean: float, std: float, /, *, generator: torch.Generator | None = None) -> None:
        """As any slice; but weights of 4 bits are each rank's own, since for whole ones in 16 there may be no room."""
        if isinstance(self._inner, AwqPart):
            self._inner.normal_(mean, std, generator=generator)
        else:
            super().normal_(mean, std, generator=generator)
