"""Ranks: the processes that hold one model together, as one of them sees it. ``ALONE`` is a process that holds all of it.

Model code takes them as an argument and calls them where a sum or a row of logits is spread over the ranks. All ranks must
make the same calls in the same order. What crosses processes is in :mod:`refimpl.parallel.collectives`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, runtime_checkable

from torch import Tensor


@runtime_checkable
class Ranks(Protocol):
    """One of ``size`` processes, number ``rank``. Rank 0 draws tokens; the others take over what it drew."""

    rank: int
    size: int
    here: int
    """How many of them run on this machine, and share a CPU's memory."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of what the ranks have, the same on every rank. It may take the place of ``x``."""

    def all_gather(self, x: Tensor) -> Tensor:
        """What every rank has, ``[size, *x.shape]``, the same on every rank."""

    def broadcast(self, x: Tensor) -> Tensor:
        """What rank 0 has; on the others ``x`` says shape and dtype. It may take the place of ``x``."""

    def least(self, value: int) -> int:
        """The least of the ranks' values. Waits for all of them."""

    def muted(self) -> AbstractContextManager[None]:
        """Within the block nothing is sent, and results mean nothing: for trial steps, which each rank may take alone."""


class _Alone:
    """A process with the whole model: nothing is sent."""

    rank = 0
    size = 1
    here = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        """``x`` is the whole sum."""
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """``x`` is all there is."""
        return x.unsqueeze(0)

    def broadcast(self, x: Tensor) -> Tensor:
        """``x``: rank 0 is here."""
        return x

    def least(self, value: int) -> int:
        """There is no other."""
        return value

    def muted(self) -> AbstractContextManager[None]:
        """There is nothing to mute."""
        return nullcontext()


ALONE: Ranks = _Alone()
"""One process that holds the whole model."""
