"""Row: one sequence's life in a timeline, as runs of steps that did the same for it."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field

STATES = ("gone", "follows", "waiting", "idle", "padding", "decode", "prefill", "queued", "swapped", "preempted")
"""By priority, the lowest first: where several steps share a pixel, the highest is drawn.

"follows": the first sample of its request computes the prompt for it. "idle": it holds a slot, and has no row in the step.
"padding": a row that is computed after its sequence's end, for nobody. "queued": it waits again, to be recomputed.
"preempted" is an event and no state."""
GONE, FOLLOWS, WAITING, IDLE, PADDING, DECODE, PREFILL, QUEUED, SWAPPED, PREEMPTED = range(len(STATES))
QUEUE = frozenset((WAITING, QUEUED, SWAPPED))
WAITS = QUEUE | {IDLE}
WITH_SLOT = frozenset((IDLE, PADDING, DECODE, PREFILL))

Kind = tuple[int, int, int]
"""(state, tokens drawn in each step, tokens that a prefill computes, or drafts that a decode checks): the same along a run.

Accepted drafts count as drawn."""
_NOTHING = (GONE, 0, 0)


@dataclass(slots=True, eq=False)
class Row:
    """A step function of columns: ``kinds[i]`` holds from column ``starts[i]`` up to the next one."""

    index: int
    sequence_id: int
    request_id: str
    letter: str
    name: str
    arrived: int
    """The column."""
    arrived_at: float
    """Seconds of the log."""
    first_sample: bool
    hue: int | None = None
    parent: int | None = None
    """The index of the row that it was forked from."""
    forked: int | None = None
    """The column."""
    starts: list[int] = field(default_factory=list)
    kinds: list[Kind] = field(default_factory=list)
    preemptions: list[int] = field(default_factory=list)
    hits: list[int] = field(default_factory=list)
    """Columns in which it began with cached blocks."""
    decisions: list[tuple[int, str]] = field(default_factory=list)
    """(column, sentence)."""
    pauses: bool = False
    """Whether it has a slot, and what was decided last is that it must pause for want of blocks."""
    first_token_at: float | None = None
    end: tuple[int, int, str] | None = None
    """(the edge between columns at which it ended, the column whose record tells it, why)."""
    _sums: list[tuple[int, int]] = field(default_factory=list)

    @property
    def state(self) -> int:
        """The one set last."""
        return self.kinds[-1][0] if self.kinds else GONE

    @property
    def gone(self) -> int | None:
        """The first column in which it is not there any more; None while it is."""
        return self.starts[-1] if self.state == GONE else None

    def stays_until(self, column: int) -> bool:
        """Whether it is there in a column, of those since it arrived."""
        return self.state != GONE or self.starts[-1] > column

    def set(self, column: int, kind: Kind) -> None:
        """It is of this kind from ``column`` on, whatever was set for that column before."""
        if self.starts and self.starts[-1] == column:
            self.starts.pop()
            self.kinds.pop()
            self._sums.pop()
        if self.kinds and self.kinds[-1] == kind:
            return
        self._sums.append(self.sums(column))
        self.starts.append(column)
        self.kinds.append(kind)

    def at(self, column: int) -> Kind:
        """What it is in a column."""
        if self.starts and column >= self.starts[-1]:
            return self.kinds[-1]
        index = bisect_right(self.starts, column) - 1
        return self.kinds[index] if index >= 0 else _NOTHING

    def sums(self, column: int) -> tuple[int, int]:
        """(steps that it waited, tokens drawn) before a column."""
        index = bisect_right(self.starts, column - 1) - 1
        if index < 0:
            return 0, 0
        waited, tokens = self._sums[index]
        state, drawn, _ = self.kinds[index]
        steps = column - self.starts[index]
        return waited + (steps if state in WAITS else 0), tokens + steps * drawn

    def runs(self, first: int, last: int) -> list[int]:
        """Its runs from column ``first`` up to ``last``, flat: from, to, and the three numbers of its ``Kind``."""
        found: list[int] = []
        for index in range(max(0, bisect_right(self.starts, first) - 1), len(self.starts)):
            if self.starts[index] >= last:
                break
            start = max(first, self.starts[index])
            end = min(last, self.starts[index + 1]) if index + 1 < len(self.starts) else last
            if self.kinds[index][0] != GONE and start < end:
                found += (start, end, *self.kinds[index])
        return found
