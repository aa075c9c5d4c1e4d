"""Unsettled tokens: drafts that a check refused, and that the host still counts, since it does not know of the check yet.

With overlap a step is planned, and its inputs are made, before the check of the step before is known. The host counts on
all drafts then. What it counts too much is kept here by slot, on the device, where it is known at once::

    bound (host)  −  unsettled (device)  =  the sequence's length

Every position, length and slot in the cache is made so. When the host learns of a check, it says so
(``SchedulerOutput.refused``), and both sides of the sum are corrected. What the host must know exactly it can read from
here, which on a GPU means to wait.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from refimpl.kernels.transfer import to_device
from refimpl.outputs import Refusal


class Unsettled:
    """One number for each of ``max_num_seqs`` slots (``N``)."""

    def __init__(self, max_num_seqs: int, device: torch.device) -> None:
        self.by_slot: Int64[Tensor, "N"] = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self._ever = False
        """Whether any draft was ever checked: without speculation nothing is computed here."""

    def expect(self) -> None:
        """Tokens may be drafted: what is recorded from here on must look."""
        self._ever = True

    def settle(self, refusals: Sequence[Refusal]) -> None:
        """The host has learned of these checks, and counts their refused tokens no more."""
        if refusals:
            pairs = torch.tensor([(one.slot, -one.num_tokens) for one in refusals], dtype=torch.int64).T.contiguous()
            slots, counts = to_device(pairs, self.by_slot.device)
            self.by_slot.index_add_(0, slots, counts)

    def forget(self, slots: Sequence[int]) -> None:
        """Other sequences take these slots, and all their tokens are known."""
        if self._ever and slots:
            self.by_slot.index_fill_(0, to_device(torch.tensor(slots, dtype=torch.int64), self.by_slot.device), 0)

    def refuse(self, slots: Int64[Tensor, "S"], counts: Int64[Tensor, "S"]) -> None:
        """A check refused so many tokens of the sequences in these slots."""
        self._ever = True
        self.by_slot.index_add_(0, slots, counts)

    def on_host(self, slots: np.ndarray) -> np.ndarray:
        """The numbers of some slots, for the host. On a GPU this waits for the step before."""
        numbers: np.ndarray = self.by_slot.cpu().numpy()[slots] if self._ever else np.zeros(len(slots), dtype=np.int64)
        return numbers

    def lowered(self, bounds: Int64[Tensor, "R"], slots: Int64[Tensor, "R"]) -> Int64[Tensor, "R"]:
        """Lengths or positions, of the host's bounds, worked out on the device."""
        return bounds - self.by_slot[slots] if self._ever else bounds
