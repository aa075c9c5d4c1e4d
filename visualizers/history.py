"""History: the records of one log, the state after any of them, and what figures gather from all of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol, TypeVar, cast

from refimpl.events import EventLog, StepRecord
from refimpl.visualizers.kept import Kept
from refimpl.visualizers.state import State
from refimpl.visualizers.tail import Tail

KEYFRAME_EVERY = 256
"""A state is kept every so many records, so that a jump replays fewer than that."""


class Fold(Protocol):
    """What a figure gathers from the records of a log, one after the other.

    Args:
        config: the log header's ``config``.
        state: where the records begin at position ``first`` and not with the run, the state before. It is read at once.

    """

    def __init__(self, config: dict[str, Any], state: State | None = None, first: int = 0) -> None: ...

    def apply(self, record: StepRecord, state: State) -> None:
        """Take the next record; ``state`` is that after it."""

    def forget(self, first: int) -> None:
        """Let go of what is told by records before a position only."""


AnyFold = TypeVar("AnyFold", bound=Fold)


class History:
    """Positions count the records from 0; ``first`` is that of the oldest one which is kept, ``len(history) - 1`` the last.

    It keeps as many records as the log's ring, and at most ``KEYFRAME_EVERY`` more; those that it forgets keep their
    positions. ``last`` is the state after the newest record, ``state_at`` that after any. Records are appended in the order
    of the log. Nothing is folded before somebody asks: the records of a saved log then go through its state and all folds
    that are asked for in one pass.
    """

    def __init__(self, log: EventLog) -> None:
        self.config = log.header.config
        self.records: Tail[StepRecord] = Tail(log.records)
        self._limit = max(1, log.records.maxlen or 0)
        self._last = State(self.config)
        self._num_folded = 0
        self._folds: dict[type[Any], Fold] = {}
        self._keyframes: dict[int, Kept] = {0: self._last.keep()}
        """Entry i: the state before record ``i * KEYFRAME_EVERY``."""
        self._cursor = State(self.config)
        self._cursor_position = -1

    def __len__(self) -> int:
        return len(self.records)

    @property
    def first(self) -> int:
        """The first position that is kept."""
        return self.records.first

    @property
    def last(self) -> State:
        """The state after the newest record."""
        self._catch_up()
        return self._last

    def append(self, record: StepRecord) -> None:
        """Take the next record of the log."""
        self.records.append(record)
        self._catch_up()
        keyframe = (len(self.records) - self._limit) // KEYFRAME_EVERY
        if keyframe * KEYFRAME_EVERY > self.first:
            self._forget(keyframe)

    def _catch_up(self) -> None:
        """Fold the records that are new."""
        if self._num_folded == len(self.records):
            return
        for position, record in enumerate(self.records[self._num_folded :], start=self._num_folded):
            self._last.apply(record)
            for fold in self._folds.values():
                fold.apply(record, self._last)
            if (position + 1) % KEYFRAME_EVERY == 0:
                self._keyframes[(position + 1) // KEYFRAME_EVERY] = self._last.keep()
        self._num_folded = len(self.records)

    def _forget(self, keyframe: int) -> None:
        """Let go of all before a keyframe."""
        self.records.forget(keyframe * KEYFRAME_EVERY)
        for fold in self._folds.values():
            fold.forget(self.first)
        for old in [number for number in self._keyframes if number < keyframe]:
            del self._keyframes[old]

    def follow(self, kinds: Iterable[type[Fold]]) -> None:
        """Have folds of these kinds from now on: all that are new in one pass over the records that are kept."""
        wanted = [kind for kind in kinds if kind not in self._folds]
        if not wanted:
            return
        state = self.before()
        new = {kind: kind(self.config, state if self.first else None, self.first) for kind in wanted}
        if self._num_folded:
            self._catch_up()
            for record in self.records:
                state.apply(record)
                for fold in new.values():
                    fold.apply(record, state)
        self._folds |= new

    def fold(self, kind: type[AnyFold]) -> AnyFold:
        """The one fold of a kind, which has all records."""
        if kind not in self._folds:
            self.follow((kind,))
        self._catch_up()
        return cast("AnyFold", self._folds[kind])

    def before(self) -> State:
        """The state before the first record that is kept, to be folded further by its taker."""
        return State.of(self._keyframes[self.first // KEYFRAME_EVERY])

    def state_at(self, position: int) -> State:
        """The state after record ``position``; after ``first - 1``, all kept records are still to come.

        It is the history's own: read it before the next call. A neighbour of the last answer is near; anything else replays
        from a keyframe.
        """
        self._catch_up()
        position = max(self.first - 1, min(position, len(self) - 1))
        if position == len(self) - 1:
            return self._last
        near = self._cursor_position >= self.first - 1 and 0 <= position - self._cursor_position < KEYFRAME_EVERY
        if not near:
            keyframe = (position + 1) // KEYFRAME_EVERY
            self._cursor, self._cursor_position = State.of(self._keyframes[keyframe]), keyframe * KEYFRAME_EVERY - 1
        for record in self.records[self._cursor_position + 1 : position + 1]:
            self._cursor.apply(record)
        self._cursor_position = position
        return self._cursor
