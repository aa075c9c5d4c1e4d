"""History: the records of one log, and the state after any of them."""

from __future__ import annotations

from typing import TypeVar

from refimpl.events import EventLog, StepRecord
from refimpl.visualizers.kept import Kept
from refimpl.visualizers.state import State
from refimpl.visualizers.tail import Tail

KEYFRAME_EVERY = 256
"""A state is kept every so many records, so that a jump replays fewer than that."""

AnyState = TypeVar("AnyState", bound=State)


class History:
    """Positions count the records from 0; ``first`` is that of the oldest one which is kept, ``len(history) - 1`` the last.

    It keeps as many records as the log's ring, and at most ``KEYFRAME_EVERY`` more; those that it forgets keep their
    positions. ``last`` is the state after the newest record, ``state_at`` that after any. Records are appended in the order
    of the log.
    """

    def __init__(self, log: EventLog) -> None:
        self.config = log.header.config
        self.records: Tail[StepRecord] = Tail()
        self.last = State(self.config)
        self._limit = max(1, log.records.maxlen or 0)
        self._keyframes: dict[int, Kept] = {0: self.last.keep()}
        """Entry i: the state before record ``i * KEYFRAME_EVERY``."""
        self._cursor = State(self.config)
        self._cursor_position = -1
        for record in tuple(log.records):
            self.append(record)

    def __len__(self) -> int:
        return len(self.records)

    @property
    def first(self) -> int:
        """The first position that is kept."""
        return self.records.first

    def append(self, record: StepRecord) -> None:
        """Take the next record of the log."""
        self.records.append(record)
        self.last.apply(record)
        keyframe, rest = divmod(len(self.records), KEYFRAME_EVERY)
        if rest == 0:
            self._keyframes[keyframe] = self.last.keep()
        self._forget((len(self.records) - self._limit) // KEYFRAME_EVERY)

    def _forget(self, keyframe: int) -> None:
        """Let go of all before a keyframe."""
        if keyframe * KEYFRAME_EVERY <= self.first:
            return
        self.records.forget(keyframe * KEYFRAME_EVERY)
        for old in [number for number in self._keyframes if number < keyframe]:
            del self._keyframes[old]

    def base(self, kind: type[AnyState]) -> AnyState:
        """The state before the first record that is kept, to be folded further by its taker."""
        return kind.of(self._keyframes[self.first // KEYFRAME_EVERY])

    def state_at(self, position: int) -> State:
        """The state after record ``position``; after ``first - 1``, all kept records are still to come.

        It is the history's own: read it before the next call. A neighbour of the last answer is near; anything else replays
        from a keyframe.
        """
        position = max(self.first - 1, min(position, len(self) - 1))
        if position == len(self) - 1:
            return self.last
        near = self._cursor_position >= self.first - 1 and 0 <= position - self._cursor_position < KEYFRAME_EVERY
        if not near:
            keyframe = (position + 1) // KEYFRAME_EVERY
            self._cursor, self._cursor_position = State.of(self._keyframes[keyframe]), keyframe * KEYFRAME_EVERY - 1
        for record in self.records[self._cursor_position + 1 : position + 1]:
            self._cursor.apply(record)
        self._cursor_position = position
        return self._cursor
