"""When to plan the next step: as late as the device allows, so that requests that come meanwhile are in it.

With overlap a step is planned while the device computes the one before it. Who plans at once leaves out everybody who comes
during that step: they wait for the rest of it, and for the whole next one::

    device    ├──── step 1 ────┼──── step 2 ────┼──── step 3 ────┤
    at once    plan 2           plan 3                                 who comes here ↓ is served in
    late                  plan 2           plan 3                        ├─ x ───────┼    3, or 2

How long a step will take is not known, but at least how long: as long as the shortest of the last ones of decodes alone, and
what the tokens of prompts added to it. Planned so much before that end as planning and ordering take, the next step is
ordered before the device has nothing to do.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import msgspec

from refimpl.outputs import Batch

REMEMBERED = 8
"""Steps of each kind that are remembered."""
LEAD = 2e-3
"""Seconds before the earliest end of a step at which the next one is planned, beside what planning takes."""


class _Ordered(msgspec.Struct, frozen=True, gc=False):
    """A step that was ordered."""

    at: float
    further: int
    """Tokens beyond one a row."""


class StepPace:
    """Learns from the steps of one device what a step takes at least."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._ordered: deque[_Ordered] = deque()
        self._last_end = clock()
        self._decodes: deque[float] = deque(maxlen=REMEMBERED)
        self._further: deque[float] = deque(maxlen=REMEMBERED)
        """Seconds a token beyond one a row."""
        self._planning: deque[float] = deque(maxlen=REMEMBERED)

    def ordered(self, planned_from: float, batch: Batch) -> None:
        """A step was ordered whose planning began at a time of the clock."""
        now = self._clock()
        self._planning.append(now - planned_from)
        self._ordered.append(_Ordered(now, batch.num_tokens - len(batch.slots)))

    def came_back(self) -> None:
        """The oldest ordered step came back."""
        step, now = self._ordered.popleft(), self._clock()
        seconds = now - max(step.at, self._last_end)
        self._last_end = now
        if step.further <= 0:
            self._decodes.append(seconds)
        elif self._decodes:
            self._further.append(max(0.0, seconds - min(self._decodes)) / step.further)

    def due_in(self) -> float:
        """Seconds for which planning the next step can wait; 0 if the device has nothing to do, or little is known."""
        if len(self._ordered) != 1 or len(self._decodes) < REMEMBERED:
            return 0.0
        step = self._ordered[0]
        least = min(self._decodes) + step.further * min(self._further, default=0.0)
        end = max(step.at, self._last_end) + least
        return max(0.0, end - LEAD - max(self._planning) - self._clock())
