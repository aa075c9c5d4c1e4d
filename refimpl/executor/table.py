"""Table: whole numbers by row and column that live on a device, and are written by the host."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from refimpl.kernels.transfer import array_to_device


class Table:
    """``[rows, columns]`` on the device, 0 at first.

    What is written is kept until :meth:`send` brings all of it there in one transfer: a step that admits 30 sequences and
    gives 200 others a block would else be 230 transfers. Between two of these a place is written once.
    """

    def __init__(self, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> None:
        self.on_device = torch.zeros(rows, columns, dtype=dtype, device=device)
        self._written: list[tuple[int, Sequence[int]]] = []

    def write(self, row: int, first_column: int, numbers: Sequence[int]) -> None:
        """Write some numbers side by side."""
        self._written.append((row * self.on_device.shape[1] + first_column, numbers))

    def send(self) -> None:
        """Bring what was written to the device: what is ordered there from now on sees it."""
        if not self._written:
            return
        pairs = np.empty((2, sum(len(numbers) for _, numbers in self._written)), dtype=np.int64)
        begin = 0
        for place, numbers in self._written:
            end = begin + len(numbers)
            pairs[0, begin:end] = np.arange(place, place + len(numbers))
            pairs[1, begin:end] = numbers
            begin = end
        places, sent = array_to_device(pairs, self.on_device.device)
        self.on_device.view(-1).index_copy_(0, places, sent.to(self.on_device.dtype))
        self._written.clear()
