"""What a timeline counts beside its rows: blocks by kind, why the queue stood still, and when requests really arrived."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from refimpl.events import StepRecord
from refimpl.outputs import NO_TOKEN
from refimpl.visualizers.tail import Tail
from refimpl.visualizers.timeline_runs import WAITS, Row


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
    on_host: int
    """Blocks of the swap space in use."""
    num_alive: int
    """Sequences in the step: they wait, run, or pad a batch."""
    num_requests: int
    num_waited: int
    """Requests that have waited."""
    num_preemptions: int
    waits: tuple[int, ...]
    """Steps that sequences have waited, by cause."""


def batch_of(record: StepRecord) -> tuple[Any, ...]:
    """What a record's batch does: two that are equal, the second without admissions, change the same rows alike."""
    return record.sequence_ids, record.num_new_tokens, record.token_ids.count(NO_TOKEN)


PAGE = 60
"""Every so many columns it is noted who holds a slot or waits."""


class Presence:
    """Which rows came and went when: what a window needs to know which rows to show.

    Args:
        first: the first column.
        present: rows that hold a slot, or head the queue, before it.

    """

    def __init__(self, first: int, present: list[int]) -> None:
        self.columns: list[int] = []
        """Where a row came, took a slot, gave it back, or went; ``rows`` says which."""
        self.rows: list[int] = []
        self._pages: Tail[list[int]] = Tail([present], first // PAGE)
        """Before every ``PAGE``-th column: the rows that hold a slot, and the first of the queue."""

    def change(self, column: int, row: int) -> None:
        """A row comes, goes, takes a slot or gives it back."""
        self.columns.append(column)
        self.rows.append(row)

    def page_ends(self, column: int) -> bool:
        """Whether ``page`` is to be called before this column."""
        return column // PAGE >= len(self._pages)

    def page(self, present: list[int]) -> None:
        """Who is there where a page begins."""
        self._pages.append(present)

    def around(self, column: int, present: list[int]) -> list[int]:
        """Rows that were there at the page's edges before and after a column; ``present`` are there now."""
        page = max(column // PAGE, self._pages.first)
        return [*self._pages[page], *(self._pages[page + 1] if page + 1 < len(self._pages) else present)]

    def between(self, first: int, last: int) -> list[int]:
        """Rows that came or went from column ``first`` up to ``last``, in order, as often as they did."""
        return self.rows[bisect_left(self.columns, first) : bisect_left(self.columns, last)]

    def nearest(self, first: int, last: int, middle: int, most: int) -> list[int]:
        """The same, at most so many of them on each side of a column."""
        start, end = bisect_left(self.columns, first), bisect_left(self.columns, last)
        at = min(max(bisect_right(self.columns, middle), start), end)
        return self.rows[max(start, at - most) : min(end, at + most)]

    def forget(self, first: int) -> None:
        """Let go of what was before a column."""
        gone = bisect_left(self.columns, first)
        del self.columns[:gone], self.rows[:gone]
        self._pages.forget(first // PAGE)


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


CAUSES = (
    *("memory", "a slot", "the budget", "the batch to end"),
    *("a step that preempts", "a token on its way", "reasons told before this log"),
)
"""What sequences wait for. The last three are no decisions of the log, but for beams that wait for each other's tokens:
nobody is admitted in a step that preempts, and who was preempted comes back when the token on its way to it is known."""
MEMORY, SLOT, BUDGET, BATCH, PREEMPTION, IN_FLIGHT, BEFORE = range(len(CAUSES))
LATE = 2
"""Steps that a token may be on its way."""
_CAUSE_OF = {
    "waits_blocks": MEMORY,
    "waits_watermark": MEMORY,
    "waits_update": MEMORY,
    "waits_slot": SLOT,
    "waits_budget": BUDGET,
    "waits_batch": BATCH,
    "waits_beams": IN_FLIGHT,
}


def cause_of(kind: str) -> int | None:
    """What a sequence waits for by a decision of this kind; None if it is no wait."""
    return _CAUSE_OF.get(kind)


class Waits:
    """Steps that sequences have waited, by cause, and requests that have waited at all."""

    def __init__(self) -> None:
        self.steps = [0] * len(CAUSES)
        self.num_requests = 0
        self._requests: set[str] = set()
        """Those that have waited and are kept."""
        self._rows: list[Row] = []
        """That came to wait since the last step was counted."""

    def begin(self, row: Row) -> None:
        """A row waits, if it still does at the end of the step."""
        self._rows.append(row)

    def count(self, hold: Hold | None, num_queued: int, since_preemption: int, idle: Iterable[Row]) -> None:
        """A step is over: the queue waits for what its head does, and rows with a slot for blocks or for the budget."""
        cause = cause_of(hold.kind) if hold is not None and hold.until is None else None
        if cause is None:
            cause = PREEMPTION if since_preemption == 0 else IN_FLIGHT if since_preemption <= LATE else BEFORE
        self.steps[cause] += num_queued
        for row in idle:
            self.steps[MEMORY if row.pauses else BUDGET] += 1
        for row in self._rows:
            if row.state in WAITS and row.request_id not in self._requests:
                self._requests.add(row.request_id)
                self.num_requests += 1
        self._rows.clear()

    def forget(self, kept: set[str]) -> None:
        """Let go of the names of all requests but these."""
        self._requests &= kept


@dataclass(slots=True)
class Hold:
    """The scheduler's reason to let one sequence wait, the head of the queue; all behind it wait for the same."""

    row: int
    since: int
    """The first column that it holds for."""
    told: int
    """The step whose record tells it."""
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

    def begin(self, row: int, column: int, step: int, kind: str, text: str) -> None:
        """A reason is told."""
        if self.last is not None and self.last.until is None:
            self.last.until = column
        self._add(Hold(row, column, step, kind, text))

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

    def forget(self, first: int) -> None:
        """Let go of those that ended before a column."""
        self.all = [hold for hold in self.all if hold.until is None or hold.until >= first]
        self.for_memory = [hold for hold in self.for_memory if hold.until is None or hold.until >= first]

    def _add(self, hold: Hold) -> None:
        self.all.append(hold)
        if cause_of(hold.kind) == MEMORY:
            self.for_memory.append(hold)
