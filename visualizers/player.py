"""Player: where a log is looked at. All widgets on one log share it, so they show the same step and pin the same request.

New records come in the engine's thread, which only raises a flag. Pictures are made in the player's own thread, which takes
at most :data:`SHARE` of the wall time: where a frame is dear, fewer are drawn, but a button is answered at once.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import takewhile
from typing import Any
from weakref import WeakKeyDictionary, ref

from refimpl.events import EventLog, StepRecord
from refimpl.visualizers.history import History

log = logging.getLogger(__name__)

SHARE = 0.03
"""Of the wall time, for drawing: where a frame is dear, fewer are drawn."""
MOST_FRAMES, FEWEST_FRAMES = 20, 5.5
"""A second. Fewer would look as if the engine stood; a frame that is so dear takes more than the share."""
TRIES = 3
SPEEDS = (2, 8, 20, 60)
"""Steps a second when a log is played."""


class Player:
    """One position in one log. ``live`` follows the newest record; stepping back leaves it, ``go_live`` returns.

    Thread-safe. Listeners are called in the player's thread, without its lock; one that raises is dropped, with a warning.
    """

    def __init__(self, log_: EventLog, engine: Any = None) -> None:
        self.history = History(log_)
        self.position = len(self.history) - 1
        self.live = True
        self.playing = False
        self.speed: float = SPEEDS[1]
        self.pinned: str | None = None
        self._engine: ref[Any] | None = None
        self._log = ref(log_)
        self._lock = threading.RLock()
        self._wake = threading.Event()
        self._urgent = threading.Event()
        """Somebody pressed a button: do not sleep."""
        self._listeners: list[Callable[[], None]] = []
        self._unsubscribe: Callable[[], None] = lambda: None
        self._thread: threading.Thread | None = None
        self._played_at: float | None = None
        self.attach(engine)

    @property
    def engine(self) -> Any:
        """The engine that writes the log, while it lives; None for a log from a file."""
        return self._engine() if self._engine is not None else None

    def attach(self, engine: Any) -> None:
        """Say which engine writes the log, if that was not known."""
        if engine is not None and self._engine is None:
            self._engine = ref(engine)

    # ------------------------------------------------------------------ records and listeners

    def _take(self, _record: StepRecord) -> None:
        """In the engine's thread: as little as possible."""
        self._wake.set()

    def catch_up(self) -> None:
        """Fold the records that came since; the position follows if it is live.

        Where more came than the log keeps, the history begins anew with what it has.
        """
        with self._lock:
            log_ = self._log()
            if log_ is not None:
                new = newer_records(log_, self.history.records[-1].step if len(self.history) else -1)
                if new and len(self.history) and len(new) == log_.records.maxlen:
                    self.history = History(log_)
                else:
                    for record in new:
                        self.history.append(record)
            last = len(self.history) - 1
            self.position = last if self.live else max(min(self.position, last), self._least())

    def _least(self) -> int:
        """The first position there is: -1 before any record."""
        return self.history.first if len(self.history) else -1

    def listen(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call ``listener()`` after each change that is to be drawn. Returns what ends it."""
        with self._lock:
            self._listeners.append(listener)
            if len(self._listeners) == 1 and (log_ := self._log()) is not None:
                self._unsubscribe = log_.subscribe(self._take)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="refimpl-player", daemon=True)
                self._thread.start()
        return lambda: self._drop(listener)

    def _drop(self, listener: Callable[[], None]) -> None:
        with self._lock:
            if listener in self._listeners:
                self._listeners.remove(listener)
                if not self._listeners:
                    self._unsubscribe()
                self._poke()  # the thread ends when nobody listens

    def _poke(self) -> None:
        self._wake.set()
        self._urgent.set()

    def locked(self) -> AbstractContextManager[Any]:
        """The lock to hold while history and position are read together. The engine's thread never takes it."""
        return self._lock

    # ------------------------------------------------------------------ moving

    def seek(self, position: int) -> None:
        """Go to a position and stay there; the last one is live again only by ``go_live``, or if the log has no engine."""
        with self._lock:
            self.catch_up()
            last = len(self.history) - 1
            self.position = max(self._least(), min(position, last))
            self.live = self.engine is None and self.position == last
            self._poke()

    def step(self, delta: int) -> None:
        """Go a step on or back."""
        with self._lock:
            self.catch_up()
            self.seek(self.position + delta)

    def go_live(self) -> None:
        """Follow the newest record."""
        with self._lock:
            self.live, self.playing = True, False
            self.catch_up()
            self._poke()

    def play(self) -> None:
        """Go on by itself, ``speed`` steps a second; from the beginning if it stands at the end."""
        with self._lock:
            self.catch_up()
            if not self.history.records:
                return
            if self.position >= len(self.history) - 1:
                self.position = self.history.first
            self.live, self.playing = False, True
            self._poke()

    def pause(self) -> None:
        """Stay at the step at hand."""
        with self._lock:
            self.live = self.playing = False
            self._poke()

    def set_speed(self, speed: float) -> None:
        """Steps a second."""
        with self._lock:
            self.speed = max(0.1, min(float(speed), 1000.0))
            self._poke()

    def pin(self, request_id: str | None) -> None:
        """Pick out one request in every widget on this log; None lets go."""
        with self._lock:
            self.pinned = request_id
            self._poke()

    def next_preemption(self) -> bool:
        """Go to the next step that preempts, from the beginning again after the last. False: there is none."""
        with self._lock:
            self.catch_up()
            found = [at for at, record in enumerate(self.history.records, self.history.first) if record.preempted]
            if found:
                self.seek(next((position for position in found if position > self.position), found[0]))
            return bool(found)

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        while True:
            self._wake.wait(1 / self.speed if self.playing else None)
            self._wake.clear()
            self._urgent.clear()
            with self._lock:
                listeners = tuple(self._listeners)
                if not listeners:
                    self._thread = None
                    return
                try:
                    self.catch_up()
                    self._advance()
                except Exception:
                    log.warning("the log cannot be followed further", exc_info=True)
                    self._thread = None
                    return
            started, began = time.thread_time(), time.monotonic()
            for listener in listeners:
                try:
                    listener()
                except Exception:
                    log.warning("a widget could not be drawn and is let go: %r", listener, exc_info=True)
                    self._drop(listener)
            self._urgent.wait(pause_after(time.thread_time() - started, time.monotonic() - began))

    def _advance(self) -> None:
        """While playing: as many steps as the time since the last frame asks for."""
        now = time.monotonic()
        if not self.playing:
            self._played_at = None
        elif self._played_at is None:
            self._played_at = now
        elif due := int((now - self._played_at) * self.speed):
            self._played_at += due / self.speed
            self.position = min(self.position + due, len(self.history) - 1)
            if self.position == len(self.history) - 1:
                self.playing, self.live = False, self.engine is None


def pause_after(used: float, took: float) -> float:
    """Seconds to wait after a frame that took so long, of which it ``used`` the processor: the rest, the engine had it."""
    return max(0.0, min(1 / FEWEST_FRAMES, max(1 / MOST_FRAMES, used / SHARE)) - min(took, 1 / MOST_FRAMES))


def newer_records(log_: EventLog, step: int) -> list[StepRecord]:
    """Records of later steps, looked for from the log's end on: what was there before is not looked at again."""
    for _ in range(TRIES):
        try:
            found = list(takewhile(lambda record: record.step > step, reversed(log_.records)))
            return found[::-1]
        except RuntimeError:  # the engine's thread took a step in between
            continue
    return [record for record in tuple(log_.records) if record.step > step]


_PLAYERS: WeakKeyDictionary[EventLog, Player] = WeakKeyDictionary()
"""A player must not refer to its log but weakly, or neither would ever go."""


def player_of(log_: EventLog, engine: Any = None) -> Player:
    """The one player of a log."""
    player = _PLAYERS.get(log_)
    if player is None:
        player = _PLAYERS[log_] = Player(log_, engine)
    player.attach(engine)
    return player
