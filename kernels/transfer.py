"""Numbers of the host on their way to a device.

A GPU works through what it was ordered to do while the host prepares the next step. A transfer from ordinary memory ends
that: the system may move such memory at any time, so the host has to wait until the GPU has come to the transfer and made
it. From pinned memory the transfer is one more order, and nobody waits. Torch keeps pinned memory that is given back until
the transfers from it are over.

A large tensor goes a piece at a time. Several threads copy the next pieces into pinned memory while the last ones are on
their way: one thread fills it more slowly than the bus empties it, above all from a file that is mapped, where every page
is asked for when it is first touched.
"""

from __future__ import annotations

import itertools
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

PIECE_BYTES = 16 * 2**20
"""Of a piece: small beside the memory of a host, large beside what ordering a transfer costs."""
MOST_READERS = 8
"""Threads that copy pieces, where there are the cores. One copied 2.8 GB in a second of its time: eight make 22, by sums."""


def to_device(numbers: Tensor, device: torch.device) -> Tensor:
    """Numbers of the host on a device, in their dtype and shape. On a CPU they are not copied."""
    return numbers.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else numbers.to(device)


def array_to_device(numbers: Any, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """The same of an array of numpy's, in its own dtype or another."""
    tensor = torch.from_numpy(numbers)
    return to_device(tensor if dtype is None else tensor.to(dtype), device)


def pieces_on(source: Tensor, device: torch.device) -> Iterator[tuple[slice, Tensor]]:
    """A tensor's rows on a device, in its dtype: (which rows, those rows), in order, :data:`PIECE_BYTES` at a time.

    Of the host's memory a piece is all that is touched at a time: one of ``source[a:b]``, a view of a mapped file, reads no
    other rows. A piece that is there already is not copied. What is given is good until the next one is asked for.

    Args:
        source: one dimension or more, anywhere.
        device: where the pieces are wanted.

    """
    pieces = row_slices(source)
    if device.type != "cuda" or source.device.type != "cpu":
        for rows in pieces:
            yield rows, source[rows].to(device)
    elif len(pieces) < 2:
        yield slice(None), to_device(source, device)
    else:
        on_their_way: deque[torch.cuda.Event] = deque()
        for rows, piece in zip(pieces, read_ahead(source, pieces, _pinned_like), strict=True):
            yield rows, piece.to(device, non_blocking=True)
            on_their_way.append(torch.cuda.current_stream(device).record_event())
            if len(on_their_way) > MOST_READERS:  # no more pinned memory than this, however slow the device
                on_their_way.popleft().synchronize()


def row_slices(source: Tensor) -> list[slice]:
    """The rows of a tensor in pieces of at most :data:`PIECE_BYTES`, or a row where one is larger."""
    at_once = max(1, PIECE_BYTES * len(source) // max(1, source.nbytes))
    return [slice(first, min(first + at_once, len(source))) for first in range(0, len(source), at_once)]


def read_ahead(source: Tensor, pieces: Sequence[slice], buffer: Callable[[Tensor], Tensor]) -> Iterator[Tensor]:
    """Copies of some rows after the other, in order; several threads make them before they are asked for.

    Args:
        source: where the rows are, on the host.
        pieces: which rows.
        buffer: memory for a piece, of its shape and dtype.

    """
    source, waiting = source.detach(), iter(pieces)
    readers = min(MOST_READERS, num_cores())
    with ThreadPoolExecutor(readers, thread_name_prefix="refimpl-read") as pool:

        def ordered() -> Iterator[Future[Tensor]]:
            for rows in waiting:
                yield pool.submit(_overwrite, buffer(source[rows]), source[rows])

        orders = ordered()
        ahead = deque(itertools.islice(orders, readers + 1))
        try:
            while ahead:
                piece = ahead.popleft().result()
                ahead.extend(itertools.islice(orders, 1))
                yield piece
        finally:
            for order in ahead:
                order.cancel()


def num_cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _pinned_like(piece: Tensor) -> Tensor:
    return torch.empty(piece.shape, dtype=piece.dtype, pin_memory=True)


def _overwrite(buffer: Tensor, piece: Tensor) -> Tensor:
    """A piece's bytes into a buffer. By numpy: it lets other threads run meanwhile, and starts none of its own."""
    if piece.stride(-1) == 1:
        buffer.view(torch.uint8).numpy()[...] = piece.view(torch.uint8).numpy()
    else:
        buffer.copy_(piece)
    return buffer
