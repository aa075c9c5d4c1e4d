"""Table: whole numbers by row and column that live on a device, and are written by the host."""

from __future__ import annotations

import numpy as np
import torch

from refimpl.kernels.transfer import to_device


class Table:
    """``[rows, columns]`` on the device, 0 at first.

    What is written is kept until :meth:`send` brings all of it there in one transfer: a step that admits 30 sequences and
    gives 200 others a block would else be 230 transfers.
    """

    def __init__(self, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> None:
        self.on_device = torch.zeros(rows, columns, dtype=dtype, device=device)
        self._written: dict[int, int] = {}

    def write(self, row: int, first_column: int, numbers: tuple[int, ...]) -> None:
        """Write some numbers side by side. A place that is written twice keeps the later number."""
        start = row * self.on_device.shape[1] + first_column
        self._written.update(zip(range(start, start + len(numbers)), numbers, strict=True))

    def send(self) -> None:
        """Bring what was written to the device: what is ordered there from now on sees it."""
        if not self._written:
            return
        count = len(self._written)
        pairs = np.empty((2, count), dtype=np.int64)
        pairs[0] = np.fromiter(self._written.keys(), np.int64, count)
        pairs[1] = np.fromiter(self._written.values(), np.int64, count)
        places, numbers = to_device(torch.from_numpy(pairs), self.on_device.device)
        self.on_device.view(-1).index_copy_(0, places, numbers.to(self.on_device.dtype))
        self._written.clear()
