"""DecisionLog: why the scheduler did what it did, kept with each request and told with each step."""

from __future__ import annotations

from collections.abc import Callable

from refimpl.outputs import Decision
from refimpl.request import Sequence


class DecisionLog:
    """Decisions of the step at hand. ``step`` is set by whoever plans or takes in a step."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.step = 0
        self._clock = clock
        self._untold: list[Decision] = []
        self._last_wait: tuple[int, str] | None = None

    def add(self, sequence: Sequence, kind: str, **numbers: int | str) -> None:
        """Record a decision about a sequence; ``kind`` and ``numbers`` are those of ``decision_texts.DECISION_TEXTS``."""
        decision = Decision(self.step, self._clock(), sequence.sequence_id, kind, numbers)
        sequence.decisions.append(decision)
        self._untold.append(decision)

    def wait(self, sequence: Sequence, kind: str, **numbers: int) -> None:
        """Record why a sequence waits, when the reason is a new one."""
        if self._last_wait != (sequence.sequence_id, kind):
            self._last_wait = (sequence.sequence_id, kind)
            self.add(sequence, kind, **numbers)

    def take(self) -> list[Decision]:
        """What was decided since the last call."""
        taken, self._untold = self._untold, []
        return taken
