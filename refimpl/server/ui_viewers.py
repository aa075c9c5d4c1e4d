"""Viewers of the page at /ui: each has a place in the log of its own; one thread draws for all of them.

::

    engine's thread: an event is set ─► the hub's thread: fold new records, make frames ─► event loop ─► one stream a viewer

The engine waits for nobody. A frame is made for a viewer only when its last one has been sent, so a slow one gets fewer; and
all drawing together takes at most :data:`SHARE` of the time. Nobody here can hold or drive the engine.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from refimpl.errors import RefimplError
from refimpl.events import EventLog
from refimpl.server.ui_records import without_texts
from refimpl.visualizers.figure import WHOLE, WIDTH, Figure, Look, Picture
from refimpl.visualizers.frames import Sender
from refimpl.visualizers.history import History
from refimpl.visualizers.page import heading
from refimpl.visualizers.player import newer_records

log = logging.getLogger(__name__)

SHARE = 0.03
"""Of the wall time, for drawing."""
SHORTEST, LONGEST = 0.05, 2.0
"""Seconds between two frames."""
ANSWER_SHARE = 0.25
"""The same share for a short while after somebody pressed a button."""
MOST_VIEWERS = 16
MOST_WAITING = 32
"""Messages of a viewer that wait to be followed; older ones are dropped."""
FASTEST = 60.0
"""Steps a second at which the log is played."""


class TooManyViewersError(RefimplError):
    """As many look already as may."""


class Feed:
    """The history of a log as some viewers may see it: with texts, or without."""

    def __init__(self, events: EventLog, with_texts: bool) -> None:
        self.with_texts = with_texts
        self._events = events
        self.history = self._empty()

    def _empty(self) -> History:
        """What has nothing yet: records are folded in the hub's thread."""
        return History(EventLog(self._events.header, self._events.records.maxlen or 1))

    def catch_up(self) -> bool:
        """Fold what came since; whether anything did. Where more came than the log keeps, it begins anew."""
        history = self.history
        new = newer_records(self._events, history.records[-1].step if history.records else -1)
        if new and len(history) and len(new) == self._events.records.maxlen:
            history = self.history = self._empty()
        for record in new:
            history.append(record if self.with_texts else without_texts(record))
        return bool(new)


class SharedFigure:
    """A figure that makes a picture once for all viewers who look at the same."""

    def __init__(self, figure: Figure) -> None:
        self.name, self.title, self.question, self.folds = figure.name, figure.title, figure.question, figure.folds
        self.inner = figure
        self._made: dict[tuple[int, int, Look], Picture] = {}

    def forget(self) -> None:
        """A new round begins."""
        self._made.clear()

    def picture(self, history: History, position: int, look: Look = WHOLE) -> Picture:
        """The figure's picture."""
        key = (id(history), position, look)
        if key not in self._made:
            self._made[key] = self.inner.picture(history, position, look)
        return self._made[key]

    def svg(self, picture: Picture, palette: dict[str, str]) -> str:
        """The figure's drawing."""
        return self.inner.svg(picture, palette)


class Viewer:
    """One page that is open: where it looks, and what it is to be sent. It is what :class:`Sender` takes for a player."""

    engine = None
    """Nothing here drives it."""

    def __init__(self, feed: Feed, figures: Sequence[SharedFigure], loop: asyncio.AbstractEventLoop) -> None:
        self.id = secrets.token_urlsafe(16)
        self.feed = feed
        self.live, self.playing = True, False
        self.speed = 8.0
        self.pinned: str | None = None
        self.position = len(feed.history) - 1
        self.inbox: deque[dict[str, Any]] = deque(maxlen=MOST_WAITING)
        self.changed = True
        self._figures = figures
        self._sender = Sender(figures)
        self._whole = True
        self._replies: deque[dict[str, Any]] = deque(maxlen=MOST_WAITING)
        self._loop = loop
        self._asked: asyncio.Future[list[str]] | None = None
        self._played_at = 0.0

    @property
    def history(self) -> History:
        """What it looks at."""
        return self.feed.history

    # ------------------------------------------------------------------ in the hub's thread

    def follow(self, now: float, news: bool) -> None:
        """Take what the page said, and go on where it plays or is live."""
        while self.inbox:
            self._act(self.inbox.popleft(), now)
        last = len(self.history) - 1
        if self.playing and (due := int((now - self._played_at) * self.speed)) > 0:
            self._played_at += due / self.speed
            self.position, self.changed = self.position + due, True
            self.playing = self.position < last
        before = self.position
        self.position = last if self.live else max(min(self.position, last), self.history.first if len(self.history) else -1)
        self.changed |= news or self.position != before

    def _act(self, message: dict[str, Any], now: float) -> None:
        """A button, a key, a click. What a page sends is not trusted: anything else is ignored."""
        self.changed = True
        try:
            self._do(message, now)
        except (KeyError, TypeError, ValueError, OverflowError):
            log.debug("a viewer's message could not be followed: %r", message)

    def _do(self, message: dict[str, Any], now: float) -> None:
        kind = message.get("type")
        if kind == "hello":
            self._whole = True
        elif kind == "width":
            self._sender.width = max(1, min(int(message["width"]), WIDTH))
        elif kind == "seek":
            self._go(int(message["position"]))
        elif kind == "step":
            self._go(self.position + int(message["delta"]))
        elif kind == "live":
            self.live, self.playing = True, False
        elif kind == "play":
            if self.position >= len(self.history) - 1:
                self.position = self.history.first
            self.live, self.playing, self._played_at = False, True, now
        elif kind == "pause":
            self.live = self.playing = False
        elif kind == "speed":
            self.speed, self._played_at = max(0.1, min(float(message["speed"]), FASTEST)), now
        elif kind == "pin":
            request = message["request"]
            self.pinned = request if isinstance(request, str) else None
        elif kind == "next_preemption":
            self._next_preemption()
        elif kind == "card":
            self._card(int(message["block"]))
        elif kind in ("hold", "engine_step"):
            self._say("this page only looks: it cannot hold the engine")

    def _go(self, position: int) -> None:
        self.live = self.playing = False
        self.position = position

    def _next_preemption(self) -> None:
        found = [at for at, record in enumerate(self.history.records, self.history.first) if record.preempted]
        if found:
            self._go(next((at for at in found if at > self.position), found[0]))
        else:
            self._say("nothing was preempted in this log")

    def _card(self, block: int) -> None:
        for figure in self._figures:
            make = getattr(figure.inner, "card", None)
            if make is not None and 0 <= block <= self.history.last.num_blocks:
                card = make(self.history, self.position, block)
                self._replies.append({"type": "card", "figure": figure.name, "card": card})

    def _say(self, text: str) -> None:
        self._replies.append({"type": "said", "text": text})

    def send(self) -> None:
        """Give the page what is new, if it has taken all that it was given."""
        asked = self._asked
        if asked is None or not (self.changed or self._replies):
            return
        messages = []
        if self.changed:
            message, buffers = self._sender.frame(self, self._whole)  # type: ignore[arg-type]
            message["transport"]["engine"] = True  # one runs behind it: the page offers to follow it
            messages.append(message | {"buffers": [base64.b64encode(buffer).decode() for buffer in buffers]})
            self.changed = self._whole = False
        while self._replies:
            messages.append(self._replies.popleft())
        texts = [json.dumps(message, separators=(",", ":")) for message in messages]
        self._asked = None
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody reads any more
            self._loop.call_soon_threadsafe(_give, asked, texts)

    # ------------------------------------------------------------------ in the event loop

    def ask(self) -> asyncio.Future[list[str]]:
        """A future for the next messages, as JSON."""
        self._asked = asked = self._loop.create_future()
        return asked


def _give(asked: asyncio.Future[list[str]], texts: list[str]) -> None:
    """In the event loop: whoever asked may have left meanwhile."""
    if not asked.done():
        asked.set_result(texts)


class Hub:
    """All viewers of one engine's log. Its thread lives while there is one.

    Args:
        events: the log.
        figures: what is shown.

    """

    def __init__(self, events: EventLog, figures: Sequence[Figure]) -> None:
        self.events = events
        self.heading = heading(events.header.config)
        self._figures = [SharedFigure(figure) for figure in figures]
        self._viewers: dict[str, Viewer] = {}
        self._feeds: dict[bool, Feed] = {}
        self._lock = threading.Lock()
        """Of viewers, feeds and thread. The engine's thread never takes it."""
        self._wake, self._urgent = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self._unsubscribe: Callable[[], None] = lambda: None

    @property
    def shown(self) -> list[list[str]]:
        """[name, title, question] of each figure."""
        return [[figure.name, figure.title, figure.question] for figure in self._figures]

    def open(self, with_texts: bool) -> Viewer:
        """A further viewer, in the running event loop.

        Raises:
            TooManyViewersError: :data:`MOST_VIEWERS` look already.

        """
        with self._lock:
            if len(self._viewers) >= MOST_VIEWERS:
                raise TooManyViewersError(f"{MOST_VIEWERS} pages look at this engine already; close one")
            if with_texts not in self._feeds:
                self._feeds[with_texts] = Feed(self.events, with_texts)
            viewer = Viewer(self._feeds[with_texts], self._figures, asyncio.get_running_loop())
            self._viewers[viewer.id] = viewer
            if self._thread is None:
                self._unsubscribe = self.events.subscribe(lambda _record: self._wake.set())
                self._thread = threading.Thread(target=self._run, name="refimpl-ui", daemon=True)
                self._thread.start()
        self.poke()
        return viewer

    def close(self, viewer: Viewer) -> None:
        """A viewer left."""
        with self._lock:
            self._viewers.pop(viewer.id, None)
        self.poke()

    def tell(self, viewer_id: str, message: Any) -> bool:
        """What a page said; False if there is no such viewer."""
        with self._lock:
            viewer = self._viewers.get(viewer_id)
        if viewer is None:
            return False
        if isinstance(message, dict):
            viewer.inbox.append(message)
            self.poke()
        return True

    def poke(self) -> None:
        """Something is to be done at once."""
        self._wake.set()
        self._urgent.set()

    def nudge(self) -> None:
        """A viewer can be sent more."""
        self._wake.set()

    def _run(self) -> None:
        while True:
            with self._lock:
                viewers = tuple(self._viewers.values())
                if not viewers:
                    self._unsubscribe()
                    self._feeds.clear()
                    self._thread = None
                    return
                feeds = tuple(self._feeds.values())
            self._wake.wait(1 / FASTEST if any(viewer.playing for viewer in viewers) else None)
            self._wake.clear()
            began = time.thread_time()
            self._round(viewers, feeds)
            used = time.thread_time() - began
            time.sleep(min(used / ANSWER_SHARE, LONGEST))
            self._urgent.wait(max(SHORTEST, min(used / SHARE, LONGEST)))
            self._urgent.clear()

    def _round(self, viewers: Sequence[Viewer], feeds: Sequence[Feed]) -> None:
        """Fold, move, send."""
        for figure in self._figures:
            figure.forget()
        news = {id(feed): feed.catch_up() for feed in feeds}
        now = time.monotonic()
        for viewer in viewers:
            try:
                viewer.follow(now, news[id(viewer.feed)])
                viewer.send()
            except Exception:
                log.warning("a viewer's picture could not be made; it is let go", exc_info=True)
                self.close(viewer)
