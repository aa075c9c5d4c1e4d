"""Streams: queues of a GPU's work. What is ordered in one runs in turn; two run beside each other but where one waits.

Whatever moves data on two streams is written against :class:`Stream`, so that its order can be tested without a GPU: by
streams that run late, early, or in any other order that the waits allow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import torch


@runtime_checkable
class Stream(Protocol):
    """A queue of work; nobody who puts something in waits for it."""

    def run(self, work: Callable[[], None]) -> None:
        """Put ``work`` into the queue. It may be called now, to order kernels and copies, or when its turn comes."""

    def record(self) -> Any:
        """An event: that all which is in the queue now has run."""

    def wait(self, event: Any) -> None:
        """Run nothing more before the event, which another stream recorded."""

    def synchronize(self) -> None:
        """Have the caller wait for all that is in the queue."""


class CudaStream:
    """A stream of a GPU: one of its own, or whichever is the current one at each call."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None = None) -> None:
        self._device = device
        self._own = stream

    @property
    def _stream(self) -> torch.cuda.Stream:
        return self._own or torch.cuda.current_stream(self._device)

    def run(self, work: Callable[[], None]) -> None:
        """Order what ``work`` orders, on this stream."""
        with torch.cuda.stream(self._stream):
            work()

    def record(self) -> torch.cuda.Event:
        """An event behind all that was ordered."""
        event: torch.cuda.Event = self._stream.record_event()
        return event

    def wait(self, event: torch.cuda.Event) -> None:
        """Have what is ordered from here on wait for the event."""
        self._stream.wait_event(event)

    def synchronize(self) -> None:
        """Wait until all that was ordered is done."""
        self._stream.synchronize()
