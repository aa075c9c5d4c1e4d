"""RunningSet: the sequences that hold a slot, in the policy's order, and the slots that nobody holds."""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Iterator

from refimpl.request import Sequence, Status
from refimpl.scheduler.request_queue import keys_that_compare


class RunningSet:
    """At most ``max_num_seqs`` sequences; the lowest free slot is given out first."""

    def __init__(self, max_num_seqs: int) -> None:
        self._sequences: list[Sequence] = []
        self._free_slots = list(range(max_num_seqs))

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        """First goes first, as it is now: sequences may come and go in the loop."""
        return iter(tuple(self._sequences))

    def __reversed__(self) -> Iterator[Sequence]:
        return reversed(tuple(self._sequences))

    @property
    def full(self) -> bool:
        """Whether every slot is taken."""
        return not self._free_slots

    def add(self, sequence: Sequence) -> int:
        """Give a sequence, whose ``order`` is set, a slot, which is returned."""
        with keys_that_compare():  # first, since they may not
            bisect.insort(self._sequences, sequence, key=lambda other: other.order)
        sequence.slot = heapq.heappop(self._free_slots)
        sequence.status = Status.RUNNING
        return sequence.slot

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence's slot back."""
        assert sequence.slot is not None
        self._sequences.remove(sequence)
        heapq.heappush(self._free_slots, sequence.slot)
        sequence.slot = None
