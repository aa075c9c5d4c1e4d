"""History: the records of one log, and the state after any of them."""

from __future__ import annotations

from refimpl.events import EventLog, StepRecord
from refimpl.visualizers.state import State

KEYFRAME_EVERY = 256
"""A state is kept every so many records, so that a jump replays fewer than that."""


class History:
    """Positions go from 0, the first record, to ``len(history) - 1``; -1 is before all of them.

    ``last`` is the state after the newest record, ``state_at`` that after any. Records are appended in the order of the log.
    """

    def __init__(self, log: EventLog) -> None:
        self.config = log.header.config
        self.records: list[StepRecord] = []
        self.last = State(self.config)
        self._keyframes = [State(self.config)]
        """Entry i: the state before record ``i * KEYFRAME_EVERY``."""
        self._cursor = State(self.config)
        self._cursor_position = -1
        for record in tuple(log.records):
            self.append(record)

    def __len__(self) -> int:
        return len(self.records)

    def append(self, record: StepRecord) -> None:
        """Take the next record of the log."""
        self.records.append(record)
        self.last.apply(record)
        if len(self.records) % KEYFRAME_EVERY == 0:
            self._keyframes.append(self.last.copy())

    def state_at(self, position: int) -> State:
        """The state after record ``position``. It is the history's own: read it before the next call.

        A neighbour of the last answer is near; anything else replays from a keyframe.
        """
        position = max(-1, min(position, len(self.records) - 1))
        if position == len(self.records) - 1:
            return self.last
        near = 0 <= position - self._cursor_position < KEYFRAME_EVERY
        if not near:
            keyframe = (position + 1) // KEYFRAME_EVERY
            self._cursor, self._cursor_position = self._keyframes[keyframe].copy(), keyframe * KEYFRAME_EVERY - 1
        while self._cursor_position < position:
            self._cursor_position += 1
            self._cursor.apply(self.records[self._cursor_position])
        return self._cursor
