"""Latencies from event records: when each request had its first token, and the pauses between a sequence's tokens.

A log is folded once, record by record; what was known at an earlier position is a prefix of what is known now.

A token's time is its record's ``updated_at``. Tokens that one step brings to a sequence come together, as accepted drafts
do: pauses are before and after them. A request arrives before the step that tells of it is planned: the moment is worked
out by :class:`refimpl.visualizers.timeline_books.Arrivals`, which is late by the microseconds between a step's last
admission and the stamp of its record.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

from refimpl.decision_texts import describe
from refimpl.events import RowKinds, StepRecord
from refimpl.outputs import NO_TOKEN, Decision
from refimpl.visualizers.latency_column import SHORTEST, Column
from refimpl.visualizers.state import State
from refimpl.visualizers.tail import Tail
from refimpl.visualizers.timeline_books import Arrivals


@dataclass(slots=True, eq=False)
class RequestLatency:
    """One request; times are seconds of the log."""

    request_id: str
    letter: str
    num_prompt_tokens: int
    arrived_at: float
    admitted_at: float | None = None
    first_position: int | None = None
    """The record that brought its first token."""
    hue: int | None = None
    why: str = ""
    """The scheduler's last reason to let it wait before its first token."""

    dot: tuple[Any, ...] = ()
    """When it has its first token: seconds to it, seconds in the queue, hue, letter, request, prompt tokens, position."""

    def begin(self, now: float, position: int) -> None:
        """Take the first token."""
        self.first_position = position
        seconds = max(SHORTEST, now - self.arrived_at)
        queued = 0.0 if self.admitted_at is None else self.admitted_at - self.arrived_at
        who = (self.hue, self.letter, self.request_id, self.num_prompt_tokens)
        self.dot = (round(seconds, 9), round(queued, 9), *who, position)


@dataclass(frozen=True, slots=True)
class Pause:
    """A time between two neighbouring tokens of a sequence."""

    seconds: float
    letter: str
    hue: int | None
    request_id: str
    position: int
    """The record that ended it."""
    cause: str
    """What the log knows: a preemption, or a prefill in the same step; else the step."""


class LatencyFold:
    """What a history's records say about latency: a :class:`refimpl.visualizers.history.Fold`.

    Args:
        config: the log header's ``config``.
        state: where the records begin at position ``first`` and not with the run, the state before.

    """

    def __init__(self, config: dict[str, Any], state: State | None = None, first: int = 0) -> None:
        self.firsts: Tail[RequestLatency] = Tail()
        """Requests that had their first token, in order of it."""
        self.first_tokens, self.pauses = Column(), Column()
        self.num_first: Tail[int] = Tail(first=first)
        """For each record, how many first tokens there were up to it; the same for ``num_pauses``."""
        self.num_pauses: Tail[int] = Tail(first=first)
        self._longest: list[Pause] = []
        """Each longer than the one before."""
        self._request_of: dict[int, RequestLatency] = {}
        self._last_token: dict[int, tuple[float, int]] = {}
        """By sequence: when its newest token came, and with which record. Of those in ``_together``, an older one."""
        self._together: Sequence[int] = ()
        """Sequences that drew the newest tokens, all with one record: when, and which, is in ``_newest``."""
        self._newest = (0.0, 0)
        self._preempted: dict[int, str] = {}
        """How a sequence was preempted since its newest token."""
        self._prefills: Tail[tuple[int, int, int]] = Tail(first=first)
        """For each record: (tokens, sequence) of its largest prefill row, and the tokens of the whole step."""
        self._without: set[int] = set()
        """Sequences of requests that have no token."""
        self._ended: deque[tuple[int, int]] = deque()
        """(position, sequence) of what ended in a record that is kept."""
        self._arrivals = Arrivals()
        self._kinds = RowKinds(() if state is None else state.prefilling())
        if state is not None:
            self._begin_with(state)

    def _begin_with(self, state: State) -> None:
        """Requests that are alive before the first record."""
        requests: dict[int, RequestLatency] = {}
        for known in state.alive():
            letter = known.letter.partition("·")[0]
            new = RequestLatency(known.request_id, letter, known.num_prompt_tokens, known.arrived_at, hue=known.hue)
            request = requests.setdefault(known.family, new)
            if known.slot is not None or known.num_output_tokens:
                request.admitted_at = known.arrived_at
            if known.num_output_tokens:
                request.first_position = len(self.num_first) - 1
        for known in state.alive():
            self._remember(known.sequence_id, requests[known.family])

    def _remember(self, sequence_id: int, request: RequestLatency) -> None:
        self._request_of[sequence_id] = request
        if request.first_position is None:
            self._without.add(sequence_id)

    def forget(self, first: int) -> None:
        """Let go of what is told by records before a position only."""
        if first <= self.num_first.first:
            return
        self.firsts.forget(self.num_first[first - 1])
        self.first_tokens.forget(self.num_first[first - 1])
        self.pauses.forget(self.num_pauses[first - 1])
        for tail in (self.num_first, self.num_pauses, self._prefills):
            tail.forget(first)
        while self._ended and self._ended[0][0] < first:
            self._request_of.pop(self._ended.popleft()[1], None)

    def request_of(self, sequence_id: int) -> RequestLatency | None:
        """The request of a sequence; None where its arrival is not in the log any more."""
        return self._request_of.get(sequence_id)

    def longest(self, position: int) -> Pause | None:
        """The longest pause up to a record."""
        index = bisect.bisect_right(self._longest, position, key=lambda pause: pause.position)
        return self._longest[index - 1] if index else None

    def apply(self, record: StepRecord, state: State) -> None:
        """Take the next record of the log; ``state`` is that after it."""
        self._arrivals.note(record)
        self._arrive(record, state)
        for decision in record.decisions:
            self._note_wait(decision)
        for preemption in record.preempted:
            self._preempted[preemption.sequence_id] = preemption.mode
        self._admit(record, state)
        self._prefills.append((*self._largest_prefill(record), sum(record.num_new_tokens)))
        self._take_tokens(record, state)
        if ended := (*record.aborted, *record.exhausted, *record.finished):
            self._part()
        for finish in ended:
            self._last_token.pop(finish.sequence_id, None)
            self._preempted.pop(finish.sequence_id, None)
            self._without.discard(finish.sequence_id)
            self._ended.append((len(self.num_first), finish.sequence_id))
        self.num_first.append(len(self.firsts))
        self.num_pauses.append(len(self.pauses))

    def _largest_prefill(self, record: StepRecord) -> tuple[int, int]:
        """(tokens, sequence)."""
        kinds = self._kinds.of(record)
        if "prefill" not in kinds:
            return 0, -1
        rows = zip(kinds, record.num_new_tokens, record.sequence_ids, strict=True)
        return max((number, sequence) for kind, number, sequence in rows if kind == "prefill")

    def _note_wait(self, decision: Decision) -> None:
        request = self._request_of.get(decision.sequence_id)
        if decision.kind.startswith("waits_") and request is not None and request.first_position is None:
            request.why = describe(decision)

    def _arrive(self, record: StepRecord, state: State) -> None:
        for arrival in record.arrived:
            at = min(self._arrivals.take(sequence_id, record) for sequence_id in arrival.sequence_ids)
            letter = state.sequences[arrival.sequence_ids[0]].letter.partition("·")[0]
            request = RequestLatency(arrival.request_id, letter, len(arrival.token_ids), at)
            for sequence_id in arrival.sequence_ids:
                self._remember(sequence_id, request)

    def _admit(self, record: StepRecord, state: State) -> None:
        for sequence_id, _, _ in record.admitted:
            if (request := self._request_of.get(sequence_id)) is not None and request.admitted_at is None:
                request.admitted_at = max(request.arrived_at, record.scheduled_at)
                request.hue = state.sequences[sequence_id].hue

    def _take_tokens(self, record: StepRecord, state: State) -> None:
        position, now = len(self.num_first), record.updated_at
        drew: Sequence[int] = record.sequence_ids[: len(record.token_ids)]
        if NO_TOKEN in record.token_ids and record.num_accepted:
            brought = [token != NO_TOKEN or n > 0 for token, n in zip(record.token_ids, record.num_accepted, strict=True)]
            drew = list(compress(record.sequence_ids, brought))
        elif NO_TOKEN in record.token_ids:
            drew = [s for s, token in zip(record.sequence_ids, record.token_ids, strict=False) if token != NO_TOKEN]
        if not drew:
            return
        longest = self._longest[-1].seconds if self._longest else -1.0
        if drew == self._together:
            since, before_position = self._newest
            self.pauses.repeat(now - since, len(drew))
            if now - since > longest:
                self._note_longest(now - since, drew[0], before_position, record, state)
        else:
            self._part()
            if not self._without.isdisjoint(drew):
                self._take_first_tokens(drew, now, position)
            rows = [(s, *self._last_token[s]) for s in drew if s in self._last_token]
            self.pauses.extend([now - since for _, since, _ in rows])
            sequence_id, since, before_position = min(rows, key=lambda row: row[1], default=(-1, now, 0))
            if rows and now - since > longest:
                self._note_longest(now - since, sequence_id, before_position, record, state)
        self._together, self._newest = drew, (now, position)
        if self._preempted:
            for sequence_id in drew:
                self._preempted.pop(sequence_id, None)

    def _part(self) -> None:
        """Another batch draws, or a sequence of the last one ends."""
        self._last_token.update(dict.fromkeys(self._together, self._newest))
        self._together = ()

    def _take_first_tokens(self, drew: Sequence[int], now: float, position: int) -> None:
        firsts = []
        for sequence_id in drew:
            request = self._request_of.get(sequence_id)
            if request is not None and request.first_position is None:
                request.begin(now, position)
                self.firsts.append(request)
                firsts.append(request.dot[0])
        self._without.difference_update(drew)
        self.first_tokens.extend(firsts)

    def _note_longest(self, seconds: float, sequence_id: int, since: int, record: StepRecord, state: State) -> None:
        sequence = state.sequences.get(sequence_id)
        letter, hue = (sequence.letter, sequence.hue) if sequence else (f"?{sequence_id}", None)
        request_id = sequence.request_id if sequence else f"sequence {sequence_id}"
        position = len(self.num_first)
        cause = self._cause(sequence_id, since, record, state)
        self._longest.append(Pause(seconds, letter, hue, request_id, position, cause))

    def _cause(self, sequence_id: int, since: int, record: StepRecord, state: State) -> str:
        """Why the sequence had no token between record ``since`` and this one, as far as the log tells."""
        if (mode := self._preempted.get(sequence_id)) is not None:
            return "swapped out" if mode == "swap" else "preempted"
        count, other, total = max(self._prefills[since + 1 :], default=(0, -1, 0))
        if 2 * count > total:
            sequence = state.sequences.get(other)
            name = sequence.letter if sequence else f"sequence {other}"
            return f"behind a prefill of {name} ({count:,} tokens)"
        return f"in step {record.step}"
