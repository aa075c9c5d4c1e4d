"""What a timeline counts beside its rows: blocks by kind, why the queue stood still, and when requests really arrived."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import NamedTuple

from refimpl.events import StepRecord
from refimpl.visualizers.state import State


class CountingState(State):
    """The state after each record, for whoever needs letters, hues and counts of blocks: no texts and computed tokens.

    A step that draws tokens for sequences which go on costs nothing but its new blocks.
    """

    def apply(self, record: StepRecord) -> None:
        """Take the next record of the log."""
        super().apply(record)
        self.changed.clear()

    def _draw(self, record: StepRecord) -> None:
        for finish in record.finished:
            self._end(finish)


class Column(NamedTuple):
    """One step, and what was counted up to and with it."""

    step: int
    prefill: int
    """Tokens computed; with ``decode`` and ``padding`` they are all of the step's."""
    decode: int
    padding: int
    owned: int
    """Blocks after the step."""
    shared: int
    cached: int
    num_alive: int
    """Sequences in the step: they wait, run, or pad a batch."""
    num_requests: int
    num_waited: int
    """Requests that have waited."""
    num_preemptions: int
    waits: tuple[int, ...]
    """Steps that sequences have waited, by cause."""


class Arrivals:
    """When sequences arrived, in seconds of the log.

    The moment is in the "arrived" decision, on the engine's clock. The log's second 0 on that clock is not in the log, but
    bounded: nothing is decided after the record that tells it was stamped.
    """

    def __init__(self) -> None:
        self._told: dict[int, float] = {}
        self._clock_start: float | None = None

    def note(self, record: StepRecord) -> None:
        """Take the decisions of the next record."""
        for decision in record.decisions:
            if decision.kind in ("arrived", "forked"):
                self._told.setdefault(decision.sequence_id, decision.time)
            planned = decision.kind in ("admitted", "resumed")
            start = decision.time - (record.scheduled_at if planned else record.updated_at)
            self._clock_start = start if self._clock_start is None else max(start, self._clock_start)

    def take(self, sequence_id: int, record: StepRecord) -> float:
        """When a sequence that ``record`` tells of arrived: at the latest when that step was planned."""
        told = self._told.pop(sequence_id, None)
        if told is None or self._clock_start is None:
            return record.scheduled_at
        return min(record.scheduled_at, told - self._clock_start)


CAUSES = ("memory", "a slot", "the budget", "the batch to end", "other reasons")
"""What sequences wait for. The last one is no reason of the scheduler's: nobody is admitted in a step that preempts."""
MEMORY, SLOT, BUDGET, BATCH, OTHER = range(len(CAUSES))
_CAUSE_OF = {
    "waits_blocks": MEMORY,
    "waits_watermark": MEMORY,
    "waits_update": MEMORY,
    "waits_slot": SLOT,
    "waits_budget": BUDGET,
    "waits_batch": BATCH,
}


def cause_of(kind: str) -> int | None:
    """What a sequence waits for by a decision of this kind; None if it is no wait."""
    return _CAUSE_OF.get(kind)


@dataclass(slots=True)
class Hold:
    """The scheduler's reason to let one sequence wait, the head of the queue; all behind it wait for the same."""

    row: int
    since: int
    """The first column that it holds for."""
    told: int
    """The column whose record tells it."""
    kind: str
    text: str
    until: int | None = None
    """The first column that it does not hold for; None while it lasts."""


class Holds:
    """All holds of a log, in order; at most one lasts. The scheduler tells a reason once, as long as it stays the same."""

    def __init__(self) -> None:
        self.all: list[Hold] = []
        self.for_memory: list[Hold] = []

    @property
    def last(self) -> Hold | None:
        """The one that began last."""
        return self.all[-1] if self.all else None

    def begin(self, row: int, column: int, kind: str, text: str) -> None:
        """A reason is told."""
        if self.last is not None and self.last.until is None:
            self.last.until = column
        self._add(Hold(row, column, column, kind, text))

    def left(self, row: int, column: int) -> None:
        """A row leaves the queue."""
        if self.last is not None and self.last.row == row and self.last.until is None:
            self.last.until = column

    def queued(self, row: int, column: int) -> None:
        """A row comes back to the queue. If the last reason told was its, it is not told again."""
        if (last := self.last) is not None and last.row == row:
            self._add(Hold(row, column, last.told, last.kind, last.text))

    def at(self, column: int) -> Hold | None:
        """The one that lasts in a column."""
        index = bisect_right(self.all, column, key=lambda hold: hold.since) - 1
        if index < 0:
            return None
        until = self.all[index].until
        return self.all[index] if until is None or column < until else None

    def between(self, first: int, last: int) -> list[Hold]:
        """Those that last in some column from ``first`` up to ``last``."""
        start = bisect_right(self.all, first, key=lambda hold: hold.since) - 1
        end = bisect_right(self.all, last - 1, key=lambda hold: hold.since)
        return [hold for hold in self.all[max(0, start) : end] if hold.until is None or hold.until > max(first, hold.since)]

    def for_memory_before(self, column: int) -> Hold | None:
        """The last one for want of blocks that began in a column or before."""
        index = bisect_right(self.for_memory, column, key=lambda hold: hold.since) - 1
        while index >= 0 and self.for_memory[index].until == self.for_memory[index].since:
            index -= 1  # another reason was told in the same step
        return self.for_memory[index] if index >= 0 else None

    def _add(self, hold: Hold) -> None:
        self.all.append(hold)
        if cause_of(hold.kind) == MEMORY:
            self.for_memory.append(hold)
