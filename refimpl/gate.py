"""Gate: between two steps, somebody who watches may hold the engine, let it take single steps, and let it go."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Gate:
    """Open by default. Any thread may close and open it; the thread that steps waits in :meth:`wait`."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._closed = False
        self._allowed = 0
        self.num_waiting = 0
        """Threads that are held right now."""

    @property
    def closed(self) -> bool:
        """Whether the next step is held."""
        return self._closed

    def close(self) -> None:
        """Hold the engine before its next step."""
        with self._changed:
            self._closed, self._allowed = True, 0

    def open(self) -> None:
        """Let it go."""
        with self._changed:
            self._closed = False
            self._changed.notify_all()

    def allow(self, steps: int = 1) -> None:
        """Let so many steps through, and hold the one after."""
        with self._changed:
            self._closed = True
            self._allowed += steps
            self._changed.notify_all()

    def wait(self, check_interrupt: Callable[[], None]) -> None:
        """Return when a step may be taken. ``check_interrupt`` is called often: a held engine can still be interrupted."""
        with self._changed:
            self.num_waiting += 1
            try:
                while self._closed and not self._allowed:
                    self._changed.wait(0.05)
                    check_interrupt()
                self._allowed = max(0, self._allowed - 1)
            finally:
                self.num_waiting -= 1
