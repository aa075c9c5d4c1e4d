"""RequestQueue: the sequences that wait for a slot, in the order in which they will get one."""

from __future__ import annotations

import heapq

from refimpl.request import Sequence


class RequestQueue:
    """First come, first served: the lowest ``sequence_id`` is the head, so a preempted sequence goes back before newer ones.

    Every operation is O(log n) in the number that wait.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, Sequence]] = []
        self._members: set[int] = set()

    def __len__(self) -> int:
        return len(self._members)

    def push(self, sequence: Sequence) -> None:
        """Add a sequence at its place."""
        assert sequence.sequence_id not in self._members, f"sequence {sequence.sequence_id} waits already"
        self._members.add(sequence.sequence_id)
        heapq.heappush(self._heap, (sequence.sequence_id, sequence))

    def head(self) -> Sequence | None:
        """The sequence whose turn it is; None if none waits."""
        while self._heap and self._heap[0][0] not in self._members:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def remove(self, sequence: Sequence) -> None:
        """Take out a sequence, wherever it stands."""
        self._members.remove(sequence.sequence_id)

    def waits(self, sequence: Sequence) -> bool:
        """Whether a sequence is in the queue."""
        return sequence.sequence_id in self._members

    def num_before(self, sequence: Sequence) -> int:
        """How many have their turn before it. O(n): for people, not for the step."""
        return sum(member < sequence.sequence_id for member in self._members)
