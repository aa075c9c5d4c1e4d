"""Watch: a log drawn on the terminal while it is written."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.text import Text

from refimpl.events import EventLog, StepRecord
from refimpl.visualizers.history import History
from refimpl.visualizers.terminal import render

MOST_FRAMES = 10
"""A second."""
SHARE = 0.05
"""Of the wall time, for drawing: where a frame is dear, fewer are drawn."""

logger = logging.getLogger(__name__)


@contextmanager
def watch(log: EventLog, console: Console | None = None) -> Iterator[None]:
    """Draw a log live on standard error while the block runs, in a thread of its own. The last picture stays there.

    A step waits for nothing: its record is only put into a queue. What is no terminal gets the last picture alone.

    Example:
        >>> with watch(llm.engine.events):  # doctest: +SKIP
        ...     llm.generate(prompts)

    """
    watcher = _Watcher(log, console or Console(stderr=True, highlight=False))
    try:
        yield
    finally:
        watcher.close()


class _Watcher:
    def __init__(self, log: EventLog, console: Console) -> None:
        self._history = History(log)
        self._incoming: deque[StepRecord] = deque()
        self._console = console
        self._over = threading.Event()
        self._live: Live | None = None
        self._thread: threading.Thread | None = None
        self._unsubscribe = log.subscribe(self._incoming.append)
        if console.is_terminal:
            # What the block prints goes where it always goes: standard output is not ours.
            self._live = Live(console=console, auto_refresh=False, redirect_stdout=False)
            self._live.start()
            self._thread = threading.Thread(target=self._run, name="refimpl-watch", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        """Draw while there is news, until the block is over."""
        pause = 0.0
        while not self._over.wait(pause):
            started = time.perf_counter()
            try:
                if self._catch_up():
                    self._draw()
            except Exception:
                logger.warning("the picture on the terminal could not be drawn and is given up", exc_info=True)
                return
            used = time.perf_counter() - started
            pause = max(1 / MOST_FRAMES, used / SHARE) - used

    def _catch_up(self) -> bool:
        """Fold what came in; whether anything did."""
        before = len(self._history)
        while self._incoming:
            self._history.append(self._incoming.popleft())
        return len(self._history) > before

    def _picture(self) -> Text:
        size = self._console.size
        colour = self._console.is_terminal and not self._console.no_color and not os.environ.get("NO_COLOR")
        last = len(self._history) - 1
        return Text.from_ansi(render(self._history, last, size.width - 1, colour=colour, height=size.height - 1))

    def _draw(self) -> None:
        if self._live is not None:
            self._live.update(self._picture(), refresh=True)

    def close(self) -> None:
        """Stop drawing, and leave the last picture."""
        self._unsubscribe()
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        try:
            self._catch_up()
            if self._live is None:
                self._console.print(self._picture(), soft_wrap=True)
            else:
                self._draw()
        except Exception:
            logger.warning("the last picture could not be drawn", exc_info=True)
        finally:
            if self._live is not None:
                self._live.stop()
