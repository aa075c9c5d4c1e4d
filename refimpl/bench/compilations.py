"""What Triton compiles meanwhile, and what it finds compiled in its cache on disk."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Compilations:
    """Counted while :func:`counted` is open; kernels may be compiled in several threads."""

    seconds: dict[str, float] = field(default_factory=dict)
    """Of each kernel that was compiled, by name; of its specialisations together."""
    compiled: int = 0
    found: int = 0
    """In the cache on disk."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def took(self, name: str, seconds: float, cache_hit: bool) -> None:
        """Take down one kernel that was asked for the first time."""
        with self.lock:
            if cache_hit:
                self.found += 1
                return
            self.compiled += 1
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds


@contextmanager
def counted() -> Iterator[Compilations]:
    """Count within the block. Nothing is counted where Triton is not installed."""
    told = Compilations()
    try:
        from triton import knobs
    except ImportError:
        yield told
        return

    def listen(*, src: Any, metadata: dict[str, Any], metadata_group: Any, times: Any, cache_hit: bool) -> None:
        told.took(metadata.get("name", getattr(src, "name", "?")), times.total / 1e6, cache_hit)

    before, knobs.compilation.listener = knobs.compilation.listener, listen
    try:
        yield told
    finally:
        knobs.compilation.listener = before
