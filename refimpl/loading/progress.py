"""How far the loading of weights is: a bar on a terminal, a line in the log at its end."""

from __future__ import annotations

import logging
import sys
import time
from types import TracebackType
from typing import Any

from tqdm import tqdm

log = logging.getLogger(__name__)

LEAST_BYTES = 2 * 10**9
"""A smaller model is there before a bar could be read."""


class LoadingProgress:
    """Counts bytes as they are read.

    Args:
        name: the model's.
        total: bytes to come, or 0 where that is not known.

    """

    def __init__(self, name: str, total: int) -> None:
        self._name = name
        self._bytes = 0
        self._bar: tqdm[Any] | None = None
        if total >= LEAST_BYTES and sys.stderr.isatty():  # one that is not shown would start tqdm's thread all the same
            said = f"loading {name}"
            self._bar = tqdm(total=total, desc=said, unit="B", unit_scale=True, leave=False, file=sys.stderr)

    def __enter__(self) -> LoadingProgress:
        self._since = time.perf_counter()
        return self

    def add(self, count: int) -> None:
        """So many bytes more are read."""
        self._bytes += count
        if self._bar is not None:
            self._bar.update(count)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.close()
        if error is None:
            seconds = time.perf_counter() - self._since
            gigabytes = self._bytes / 1e9
            rate = gigabytes / max(seconds, 1e-9)
            log.info("%s: %.2f GB of weights in %.2f s (%.1f GB/s)", self._name, gigabytes, seconds, rate)
