"""Comm messages: a dashboard's buttons, handled while a cell is still running, between two steps.

A Jupyter kernel handles messages one after the other: while a cell blocks in ``LLM.generate``, a click waits for its end.
Where both kernel and front end know subshells (ipykernel 7, JupyterLab 4.4 and later), clicks come in through a thread of
their own. Elsewhere ``generate`` looks itself whether any wait.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

log = logging.getLogger(__name__)

INTERVAL = 0.05
"""Seconds between two looks."""
POLLIN = 1
"""zmq.POLLIN, without importing zmq."""


def comm_messages_between_steps() -> Callable[[], None]:
    """What to call between two steps: at most every 50 ms, it handles the messages for refimpl's own widgets that wait.

    Only those for comms marked ``answers_between_steps`` are taken: the handlers of other widgets may do anything, also
    generate again. All other messages (cells to run, completions) stay in their order and are handled when the cell ends.
    Outside the main thread of a Jupyter kernel it does nothing.
    """
    found = _kernel_and_stream()
    return _Server(*found).serve if found is not None else lambda: None


def _kernel_and_stream() -> tuple[Any, Any] | None:
    """The kernel in whose main thread this is, and the stream on which messages for that thread come in."""
    ipython = sys.modules.get("IPython")
    if ipython is None or threading.current_thread() is not threading.main_thread():
        return None
    kernel: Any = getattr(ipython.get_ipython(), "kernel", None)
    try:
        if getattr(kernel, "shell_channel_thread", None) is None:
            stream = kernel.shell_stream  # ipykernel 6, or no subshells: the socket itself
        else:  # a thread reads the socket, and sends on what is meant for the main thread
            stream = kernel.shell_channel_thread.manager.get_shell_channel_to_subshell_pair(None).to_stream
        usable = callable(stream.flush) and callable(stream._recv_callback) and callable(kernel.comm_manager.comm_msg)
    except AttributeError:  # no kernel, or one that is built in another way
        return None
    return (kernel, stream) if usable else None


class _Server:
    """Takes messages off a kernel's stream, in its own thread and by the stream's own means."""

    def __init__(self, kernel: Any, stream: Any) -> None:
        self._kernel = kernel
        self._stream = stream
        self._next_look = 0.0

    def serve(self) -> None:
        """Handle what waits, if it is time to look."""
        if time.monotonic() < self._next_look:
            return
        self._next_look = float("inf")  # a handler that comes back here finds nothing to do
        try:
            self._serve()
        except Exception:  # a kernel that is built in another way: leave it alone from now on
            log.warning("messages of widgets wait until the cell ends: they could not be read", exc_info=True)
            return
        self._next_look = time.monotonic() + INTERVAL

    def _serve(self) -> None:
        stream, received = self._stream, deque[Any]()
        kernels_own = stream._recv_callback
        stream.on_recv(received.append, copy=False)
        try:
            stream.flush(POLLIN)
        finally:
            stream.on_recv(kernels_own, copy=False)
        try:
            while received:
                if not self._handle(received[0]):
                    _hand_back(kernels_own, received[0])
                received.popleft()
        finally:
            for frames in received:  # a second Ctrl-C: nothing is lost
                _hand_back(kernels_own, frames)

    def _handle(self, frames: Any) -> bool:
        """Handle a message, if it is for one of our widgets."""
        kernel, session = self._kernel, self._kernel.session
        idents, parts = session.feed_identities(frames, copy=False)
        try:
            seen = session.deserialize(parts, content=False, copy=False)  # a look, which does not count as a receipt
            if seen["header"]["msg_type"] != "comm_msg":
                return False
            comm = kernel.comm_manager.comms.get(session.unpack(seen["content"])["comm_id"])
            if not getattr(comm, "answers_between_steps", False):
                return False
            message = session.deserialize(parts, content=True, copy=False)
        except (ValueError, KeyError, TypeError):
            return False  # damaged, or not signed: the kernel says so
        kernel._publish_status("busy", "shell", parent=message)
        kernel.comm_manager.comm_msg(self._stream, idents, message)  # logs what a handler raises
        kernel._publish_status("idle", "shell", parent=message)
        kernel._publish_status("busy", "shell")  # the cell still runs
        return True


def _hand_back(callback: Callable[[Any], Any], frames: Any) -> None:
    """Give the kernel a message as its stream would have. What it starts for it runs, in order, when the cell ends."""
    result = callback(frames)
    if inspect.isawaitable(result):
        asyncio.ensure_future(result).add_done_callback(_log_failure)


def _log_failure(task: asyncio.Future[Any]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("a message could not be handled", exc_info=error)
