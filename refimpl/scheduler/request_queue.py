"""RequestQueue: the sequences that wait for a slot, in the policy's order."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from refimpl.errors import PolicyError
from refimpl.request import Sequence


@contextmanager
def keys_that_compare() -> Iterator[None]:
    """While keys are compared.

    Raises:
        PolicyError: two of them do not.

    """
    try:
        yield
    except PolicyError:
        raise
    except Exception as error:
        raise PolicyError(f"the policy's keys do not compare with each other: {error!r}") from error


class RequestQueue:
    """The lowest key is the head; ties go by arrival, so a preempted sequence goes back before newer ones.

    Whatever needs a key raises PolicyError where the policy gives none, or one that does not compare with others.

    With keys that do not change, every operation is O(log n) in the number that wait; with ``dynamic`` ones the head is
    looked for each time.
    """

    def __init__(self, key: Callable[[Sequence], Any], dynamic: bool = False) -> None:
        self._key = key
        self._dynamic = dynamic
        self._heap: list[tuple[Any, int, Sequence]] = []
        self._members: dict[int, Sequence] = {}

    def __len__(self) -> int:
        return len(self._members)

    def push(self, sequence: Sequence) -> None:
        """Add a sequence at its place. Where the policy does not tell it, nothing is added."""
        assert sequence.sequence_id not in self._members, f"sequence {sequence.sequence_id} waits already"
        if not self._dynamic:
            entry = (self._key(sequence), sequence.sequence_id, sequence)
            try:
                with keys_that_compare():
                    heapq.heappush(self._heap, entry)
            except PolicyError:
                self._heap.remove(entry)
                heapq.heapify(self._heap)
                raise
        self._members[sequence.sequence_id] = sequence

    def head(self) -> Sequence | None:
        """The sequence whose turn it is; None if none waits."""
        if self._dynamic:
            return self._first_of(self._members.values())
        while self._heap and self._heap[0][1] not in self._members:
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def head_of(self, sequence_ids: Iterable[int]) -> Sequence | None:
        """The one of these sequences whose turn comes first; None if none of them waits. O(their number)."""
        waiting = [self._members[sequence_id] for sequence_id in sequence_ids if sequence_id in self._members]
        return self._first_of(waiting)

    def first(self, count: int) -> list[Sequence]:
        """The ``count`` sequences whose turn comes first, in order. O(n)."""
        with keys_that_compare():
            return heapq.nsmallest(count, self._members.values(), key=self._order)

    def remove(self, sequence: Sequence) -> None:
        """Take out a sequence, wherever it stands."""
        del self._members[sequence.sequence_id]

    def waits(self, sequence: Sequence) -> bool:
        """Whether a sequence is in the queue."""
        return sequence.sequence_id in self._members

    def num_before(self, sequence: Sequence) -> int:
        """How many have their turn before it. O(n): for people, not for the step."""
        own = self._order(sequence)
        with keys_that_compare():
            return sum(self._order(member) < own for member in self._members.values())

    def _first_of(self, sequences: Iterable[Sequence]) -> Sequence | None:
        with keys_that_compare():
            return min(sequences, key=self._order, default=None)

    def _order(self, sequence: Sequence) -> tuple[Any, int]:
        return self._key(sequence), sequence.sequence_id
