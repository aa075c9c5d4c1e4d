"""Watchdog: says in the log when a step does not end, and where it is."""

from __future__ import annotations

import logging
import sys
import threading
import time
import traceback

log = logging.getLogger(__name__)

PATIENCE = 60.0
"""Seconds that a step may take before the log says so; at twice that it says so again, and so on."""


class Watchdog:
    """Watches the thread that calls :meth:`begin` before and :meth:`end` after each step, from a thread that sleeps.

    ``begin`` and ``end`` write one attribute, so a step does not feel them.
    """

    def __init__(self, patience: float = PATIENCE) -> None:
        self.patience = patience
        self._since: float | None = None
        self._watched: int | None = None
        self._changed = threading.Condition()
        self._asleep = False
        self._over = False
        self._thread = threading.Thread(target=self._run, name="refimpl-watchdog", daemon=True)
        self._thread.start()

    def begin(self) -> None:
        """A step begins in this thread."""
        self._watched = threading.get_ident()
        self._since = time.monotonic()
        if self._asleep:
            with self._changed:
                self._changed.notify()

    def end(self) -> None:
        """It ended."""
        self._since = None

    @property
    def seconds_in_step(self) -> float:
        """How long the step at hand takes already; 0 between steps. Any thread may ask."""
        since = self._since
        return 0.0 if since is None else time.monotonic() - since

    def close(self) -> None:
        """End the thread."""
        with self._changed:
            self._over = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        told_since, limit = 0.0, self.patience
        with self._changed:
            while not self._over:
                since = self._since
                if since is None:
                    self._sleep()
                    continue
                if since != told_since:
                    told_since, limit = since, self.patience
                age = time.monotonic() - since
                if age >= limit:
                    log.warning("a step has taken %.0f s and has not ended; it is at\n%s", age, self._where())
                    limit *= 2
                self._changed.wait(max(0.01, limit - age))

    def _sleep(self) -> None:
        """Until a step begins."""
        self._asleep = True
        if self._since is None and not self._over:
            self._changed.wait()
        self._asleep = False

    def _where(self) -> str:
        frame = sys._current_frames().get(self._watched or 0)
        return "".join(traceback.format_stack(frame)[-8:]).rstrip() if frame is not None else "(its thread is gone)"
