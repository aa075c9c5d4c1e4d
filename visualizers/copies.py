"""Which records of a history copy blocks, and the state at the moment before a copy."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Container
from typing import TypeVar

import msgspec

from refimpl.events import StepRecord
from refimpl.outputs import BlockCopy
from refimpl.visualizers.history import KEYFRAME_EVERY, History
from refimpl.visualizers.state import State

Result = TypeVar("Result")
Written = tuple[int, BlockCopy]
"""A copy, and the sequence that writes into it."""


class Copies:
    """The copies of one history, which is given to each call.

    A state of its own walks from copy to copy, so that playing a log folds each of its records once more, and no more.
    """

    def __init__(self) -> None:
        self._num_seen = 0
        self._known: set[int] = set()
        """Living sequences that arrived or were admitted in the log: the tables of others are not known."""
        self._positions: list[int] = []
        self._totals: list[int] = []
        """Copies up to each of these positions."""
        self._state: State | None = None
        self._state_position = -1

    def latest(self, history: History, position: int) -> tuple[int, int] | None:
        """(position, copies so far) of the latest record at or before ``position`` that copies a block."""
        if self._num_seen < history.first:  # what was not looked at is gone
            self._known = set(history.before().sequences)
            self._num_seen = history.first
        for number, record in enumerate(history.records[self._num_seen :], start=self._num_seen):
            for arrival in record.arrived:
                self._known.update(arrival.sequence_ids)
            self._known.update(sequence_id for sequence_id, _, _ in record.admitted)
            if found := copies_of(record, self._known):
                self._positions.append(number)
                self._totals.append((self._totals[-1] if self._totals else 0) + len(found))
            self._known.difference_update(f.sequence_id for f in (*record.aborted, *record.exhausted, *record.finished))
        self._num_seen = len(history)
        gone = bisect_left(self._positions, history.first)
        del self._positions[:gone], self._totals[:gone]
        number = bisect_right(self._positions, position) - 1
        return None if number < 0 else (self._positions[number], self._totals[number])

    def before(self, history: History, position: int, read: Callable[[State, StepRecord, list[Written]], Result]) -> Result:
        """What ``read`` says of the moment before the record at ``position`` makes its copies."""
        state = self._state
        near = 0 <= position - 1 - self._state_position < KEYFRAME_EVERY and self._state_position >= history.first - 1
        if state is None or not near:
            state = State.of(history.state_at(position - 1).keep())
            self._state_position = position - 1
        for record in history.records[self._state_position + 1 : position]:
            state.apply(record)
        planned, rest = halves(history.records[position])
        state.apply(planned)
        result = read(state, history.records[position], copies_of(rest, state.sequences))
        state.apply(rest)
        self._state, self._state_position = state, position
        return result


def halves(record: StepRecord) -> tuple[StepRecord, StepRecord]:
    """A record as two: what was planned before its copies, which a fork may be, and the copies and all after."""
    still = (0,) * len(record.slots)
    planned = msgspec.structs.replace(record, copies=(), num_new_tokens=still, token_ids=(), token_texts=(), finished=())
    rest = StepRecord(
        step=record.step,
        scheduled_at=record.scheduled_at,
        updated_at=record.updated_at,
        sequence_ids=record.sequence_ids,
        slots=record.slots,
        num_new_tokens=record.num_new_tokens,
        token_ids=record.token_ids,
        token_texts=record.token_texts,
        finished=record.finished,
        copies=record.copies,
    )
    return planned, rest


def copies_of(record: StepRecord, known: Container[int]) -> list[Written]:
    """The copies of a record whose writer is known."""
    if not record.copies:
        return []
    by_slot = dict(zip(record.slots, record.sequence_ids, strict=True))
    return [(by_slot[copy.slot], copy) for copy in record.copies if by_slot[copy.slot] in known]
