"""Page-locked ("pinned") memory of the host, which a GPU reads and writes by itself, beside its computing.

``torch.empty(pin_memory=True)`` takes the next power of two of bytes, so 17 GiB are 32, and keeps what is freed for later
tensors like it. A swap space is large and lives as long as its engine, so it is ordinary memory that is locked in place:
exactly the bytes asked for, and given back to the system when it is released.
"""

from __future__ import annotations

import contextlib
import math
import os
import weakref
from mmap import PAGESIZE

import torch
from torch import Tensor

from refimpl.config import GIB
from refimpl.errors import OutOfMemoryError


class PinnedMemory:
    """Memory for a tensor that the host holds and ``device`` reaches; it is not cleared.

    Raises:
        OutOfMemoryError: so much cannot be locked.

    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        pages = -(-math.prod(shape) * dtype.itemsize // PAGESIZE)
        try:
            memory = torch.empty((pages + 1) * PAGESIZE, dtype=torch.uint8)
            begin = -memory.data_ptr() % PAGESIZE  # whole pages, which nothing else lies in
            locked = memory[begin : begin + pages * PAGESIZE]
            with torch.cuda.device(device):
                torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(locked.data_ptr(), locked.nbytes, 0))
        except RuntimeError as error:
            _forget_the_error(device)
            raise OutOfMemoryError(
                f"{pages * PAGESIZE / GIB:.2f} GiB of the host's memory could not be locked for the swap space: {error}; "
                "lower swap_space"
            ) from error
        self.tensor = locked[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
        # An engine that nobody closes must not leave locked pages behind either. At the exit, the system takes them.
        self._give_back = weakref.finalize(self, _give_back, locked, device, os.getpid())
        self._give_back.atexit = False

    def release(self) -> None:
        """Give the memory back now, whoever still refers to the tensor; once all copies from and to it are done."""
        self._give_back()


def _forget_the_error(device: torch.device) -> None:
    """CUDA keeps what went wrong last until somebody asks, and torch asks after its next kernel, which did nothing wrong."""
    if torch.cuda.is_initialized():
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device=device)


def _give_back(locked: Tensor, device: torch.device, owner: int) -> None:
    """In a child that was forked off, nothing is done: the lock is its parent's."""
    if os.getpid() != owner:
        return
    torch.cuda.synchronize(device)
    torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(locked.data_ptr()))
    locked.untyped_storage().resize_(0)
