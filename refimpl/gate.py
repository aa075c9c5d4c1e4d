"""Gate: between two steps, somebody who watches may hold the engine, let it take single steps, and let it go."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

log = logging.getLogger(__name__)

PATIENCE = 10.0
"""Seconds that an engine is held before the log says so."""
POLL = 0.05
"""Seconds between two looks at what else is to be done, while an engine is held."""


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
        """Whether steps are held, but for those that were allowed one by one."""
        return self._closed

    @property
    def holds(self) -> bool:
        """Whether who comes now would be held."""
        return self._closed and not self._allowed

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

    def allow_if_held(self) -> bool:
        """Let one step through if somebody is held right now; whether that was so."""
        with self._changed:
            held = self._closed and self.num_waiting > 0
            if held:
                self._allowed += 1
                self._changed.notify_all()
            return held

    def wake(self) -> None:
        """Have who is held call its ``meanwhile`` now."""
        with self._changed:
            self._changed.notify_all()

    def wait(self, meanwhile: Callable[[], None]) -> None:
        """Return when a step may be taken. ``meanwhile`` is called often, so that who is held can be interrupted and asked.

        It is called without the lock: it may close and open this gate, and wait for others who do.
        """
        with self._changed:
            if self._take():
                return
            self.num_waiting += 1
        try:
            since, told = time.monotonic(), False
            while not self._take_within(POLL):
                meanwhile()
                if not told and time.monotonic() - since > PATIENCE:
                    told = True
                    log.warning("the engine is held between two steps; engine.gate.open() lets it go")
        except BaseException:
            with self._changed:
                self.num_waiting -= 1
            raise

    def _take(self) -> bool:
        """Whether the next step may be taken; then it is taken off those allowed."""
        if self.holds:
            return False
        self._allowed = max(0, self._allowed - 1)
        return True

    def _take_within(self, seconds: float) -> bool:
        with self._changed:
            if self.holds:
                self._changed.wait(seconds)
            taken = self._take()
            self.num_waiting -= taken
            return taken
