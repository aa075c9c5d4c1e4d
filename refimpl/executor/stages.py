"""Stages of a start-up: what is being made, and how long each part took."""

from __future__ import annotations

import time


class Stages:
    """One stage follows the other; the last goes on until :meth:`end`."""

    def __init__(self, first: str) -> None:
        self.seconds: dict[str, float] = {}
        """Of each stage that is over, in their order."""
        self.current = first
        self._since = time.perf_counter()

    def enter(self, name: str) -> None:
        """End the current stage, and begin the next."""
        self.end()
        self.current = name

    def end(self) -> None:
        """End the current stage."""
        now = time.perf_counter()
        self.seconds[self.current] = self.seconds.get(self.current, 0.0) + now - self._since
        self._since = now
