"""Timeline: what each step did for each sequence, folded from event records.

A column is a record of the log: steps without a record make none. A record costs what changes with it, not what runs in it.

With overlap a step is planned before the last one's tokens are known. So a record may still compute a row of a sequence that
the record before it ended: such a cell is padding, computed for nobody, as in a static batch. It may also preempt one whose
last token was on the way: the mark then stands behind its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

from refimpl.decision_texts import describe
from refimpl.events import ArrivalRecord, RowKinds, StepRecord
from refimpl.outputs import NO_TOKEN, Decision, Finish
from refimpl.visualizers.state import State
from refimpl.visualizers.tail import Tail
from refimpl.visualizers.timeline_books import Arrivals, Column, Holds, Presence, Waits, batch_of, cause_of
from refimpl.visualizers.timeline_overview import Overview
from refimpl.visualizers.timeline_runs import (
    DECODE,
    FOLLOWS,
    GONE,
    IDLE,
    PADDING,
    PREEMPTED,
    PREFILL,
    QUEUE,
    QUEUED,
    STATES,
    SWAPPED,
    WAITING,
    WAITS,
    WITH_SLOT,
    Row,
)

QUEUE_NOTED = 64
"""Of a long queue, only the first ones are."""
_SAYS_NO_MORE = frozenset(("decoding",))
"""Decisions that the cell itself shows."""


class Timeline:
    """Rows, columns, and the queue's reasons of one log: a :class:`refimpl.visualizers.history.Fold`.

    Args:
        config: the log header's ``config``.
        state: where the records begin at column ``first`` and not with the run, the state before.

    """

    def __init__(self, config: dict[str, Any], state: State | None = None, first: int = 0) -> None:
        self.rows: Tail[Row] = Tail()
        """In order of arrival."""
        self.row_of: dict[int, Row] = {}
        """By sequence."""
        self.columns: Tail[Column] = Tail(first=first)
        self.holds = Holds()
        self.overview = Overview(len(STATES), first)
        self.most_drawn = 1
        """The most tokens that a row drew in one step."""
        self.most_tokens = 0
        """The most that one step computed."""
        self.num_drawn = 0
        """Tokens, by all rows together."""
        self.slot_steps = self.padded_steps = 0
        """Steps for which a slot was held, over all rows; and those by sequences that had ended."""
        self.started_at: float | None = None
        self.ended_at = 0.0
        self.presence = Presence(first, [])
        shares = config.get("can_share", not config.get("reserved_blocks"))  # logs of 0.1 do not tell
        self._can_follow = bool(config.get("enable_kv_cache", True) and shares)
        self._kinds = RowKinds(() if state is None else state.prefilling())
        self._arrivals = Arrivals()
        self._holding: dict[int, Row] = {}
        """Rows that hold a slot, by index."""
        self._decoding: set[int] = set()
        """Sequences that draw one token in each step, without drafts."""
        self._queue, self._counts = dict[int, Row](), [0] * len(STATES)
        self._followers: dict[str, list[Row]] = {}
        """By request, samples that wait for their prompt."""
        self._late: list[Row] = []  # of sequences that have ended, without a slot
        self._untold: dict[int, list[Decision]] = {}
        """Decisions about sequences whose arrival a later record tells."""
        self._num_requests, self._num_preemptions, self._last_preemption = 0, 0, -(10**9)  # of the last, its column
        self._waits = Waits()
        self._steady: tuple[Any, ...] | None = None
        """The last record's batch, if another of the same rows would do the same."""
        self._computed = (0, 0, 0)
        if state is not None:
            self._begin_with(state)

    def __len__(self) -> int:
        return len(self.columns)

    def _begin_with(self, state: State) -> None:
        """Rows of all that are alive before the first column: what each did is known from there on."""
        self._num_requests = len({sequence.request_id for sequence in state.alive()})
        phases = {"waiting": WAITING, "preempted": QUEUED, "swapped": SWAPPED, "padding": PADDING}
        begun = {known.family for known in state.alive() if known.num_output_tokens}
        for known in state.alive():
            first = known.family == known.sequence_id
            row = self._add(known.sequence_id, known.request_id, known.letter, known.name, known.arrived_at, first)
            row.hue, follows = known.hue, self._can_follow and not first and known.family not in begun
            if known.slot is not None:
                self._holding[row.index] = row
            if follows:
                self._followers.setdefault(known.request_id, []).append(row)
            self._set(row, len(self), FOLLOWS if follows and known.slot is None else phases.get(known.phase, IDLE))
        self.presence = Presence(len(self), self._present())

    def around(self, column: int) -> list[int]:
        """Rows that held a slot, or headed the queue, at the page's edges before and after a column."""
        found, first = self.presence.around(column, self._present()), self.rows.first
        return [index for index in found if index >= first] if first else found

    def forget(self, first: int) -> None:
        """Let go of all before a column, and of the rows that had gone by then. The overview stays that of the whole log."""
        if first <= self.columns.first:
            return
        self.columns.forget(first)
        self.holds.forget(first)
        self.presence.forget(first)
        kept = next((row.index for row in self.rows if row.gone is None or row.gone >= first), len(self.rows))
        for row in self.rows[:kept]:
            if self.row_of.get(row.sequence_id) is row:
                del self.row_of[row.sequence_id]
        self.rows.forget(kept)
        self._waits.forget({row.request_id for row in self.rows})

    def _present(self) -> list[int]:
        return [*self._holding, *islice(self._queue, QUEUE_NOTED)]

    def apply(self, record: StepRecord, state: State) -> None:
        """Take the next record of the log; ``state`` is that after it."""
        column = len(self.columns)
        if self.presence.page_ends(column):
            self.presence.page(self._present())
        self._arrivals.note(record)
        for arrival in record.arrived:
            self._arrive(arrival, record, state)
        for finish in (*record.aborted, *record.exhausted):
            self._end(finish, column, column)
        for preemption in record.preempted:
            self._preempt(preemption.sequence_id, preemption.mode)
        self._admit(record, state)
        if not self._goes_on(record):
            self._compute(record)
        for decision in record.decisions:
            self._note(decision, record.step)
        self.overview.close(column)
        self._count(record, state)
        for row in self._late:
            self._set(row, column + 1, GONE)
        self._late.clear()
        for finish in record.finished:
            self._end(finish, column, column + 1)

    # ------------------------------------------------------------------ who comes and goes

    def _arrive(self, arrival: ArrivalRecord, record: StepRecord, state: State) -> None:
        self._num_requests += 1
        for index, sequence_id in enumerate(arrival.sequence_ids):
            known = state.sequences[sequence_id]
            at = self._arrivals.take(sequence_id, record)
            row = self._add(sequence_id, arrival.request_id, known.letter, known.name, at, index == 0)
            if index and self._can_follow:
                self._followers.setdefault(arrival.request_id, []).append(row)
                self._set(row, len(self), FOLLOWS)
            else:
                self._set(row, len(self), WAITING)

    def _add(self, sequence_id: int, request_id: str, letter: str, name: str, at: float, first: bool) -> Row:
        row = Row(len(self.rows), sequence_id, request_id, letter, name, len(self), at, first)
        self.rows.append(row)
        self.row_of[sequence_id] = row
        for decision in self._untold.pop(sequence_id, ()):
            row.decisions.append((len(self), describe(decision)))
        return row

    def _unseen(self, sequence_id: int, record: StepRecord) -> Row:
        """A sequence whose arrival is not in the log any more; it holds a slot."""
        name = f"sequence {sequence_id}"
        row = self._add(sequence_id, name, f"?{sequence_id}", name, record.scheduled_at, True)
        self._holding[row.index] = row
        return row

    def _admit(self, record: StepRecord, state: State) -> None:
        parents = {child: parent for parent, child in record.forks}
        for sequence_id, _, _ in record.admitted:
            row = self.row_of.get(sequence_id) or self._unseen(sequence_id, record)
            if row.end is not None:
                continue
            self._holding[row.index] = row
            if (known := state.sequences.get(sequence_id)) is not None:
                row.hue = known.hue
            parent = self.row_of.get(parents.get(sequence_id, -1))
            if parent is not None:
                row.parent, row.forked = parent.index, len(self)
        for hit in record.prefix_hits:
            if (found := self.row_of.get(hit.sequence_id)) is not None:
                found.hits.append(len(self))

    def _preempt(self, sequence_id: int, mode: str) -> None:
        """A running sequence gives way; or a swapped one, which was preempted before, is to be recomputed."""
        self._steady, row = None, self.row_of.get(sequence_id)
        if row is not None and row.state == SWAPPED:
            self._set(row, len(self), QUEUED)
            return
        self._num_preemptions += 1
        self._last_preemption = len(self)
        if row is not None:
            row.preemptions.append(len(self))
            self.overview.mark(row.index, PREEMPTED)
        if row is not None and row.end is None:
            self._holding.pop(row.index, None)
            self._set(row, len(self), SWAPPED if mode == "swap" else QUEUED)

    def _end(self, finish: Finish, column: int, edge: int) -> None:
        """A column tells that a sequence ends at an edge between columns; one of a static batch does so twice."""
        self._steady = None
        if (row := self.row_of.get(finish.sequence_id)) is None:
            return
        if row.end is None:
            row.end = (edge, column, finish.reason)
        if finish.stays:
            self._set(row, edge, PADDING)
        else:
            self._holding.pop(row.index, None)
            self._set(row, edge, GONE)

    # ------------------------------------------------------------------ the batch

    def _goes_on(self, record: StepRecord) -> bool:
        """Whether the batch does for each row what the last one did: then no run changes."""
        if record.admitted or self._steady is None:
            return False
        return batch_of(record) == self._steady

    def _compute(self, record: StepRecord) -> None:
        """The rows of a batch, and what they computed tokens for."""
        column, computed, steady = len(self), [0] * len(STATES), not record.num_accepted
        kinds, others = self._kinds.of(record), self._not_as_before(record)
        computed[DECODE] = sum(record.num_new_tokens) - sum(record.num_new_tokens[index] for index in others)
        for index in others:
            sequence_id = record.sequence_ids[index]
            row = self.row_of.get(sequence_id) or self._unseen(sequence_id, record)
            token = record.token_ids[index] if index < len(record.token_ids) else NO_TOKEN
            num_new, drawn = record.num_new_tokens[index], int(token >= 0)
            drafts = record.num_drafts[index] if record.num_drafts else 0
            drawn += record.num_accepted[index] if record.num_accepted else 0  # an end among them leaves no token behind
            prefill = kinds[index] == "prefill" and num_new > 0  # a sample that draws from its leader's logits computes none
            state = PADDING if row.end is not None else PREFILL if prefill else DECODE
            drawn = 0 if state == PADDING else drawn
            self._set(row, column, state, drawn, {PREFILL: num_new, DECODE: drafts}.get(state, 0))
            computed[state] += num_new
            if state == PADDING and row.index not in self._holding:
                self._late.append(row)
            if drawn:
                self._drew(row, drawn, record)
            steady &= state == PADDING or (state == DECODE and drawn == 1)
        if len(record.sequence_ids) - len(self._late) < len(self._holding):
            batch = set(record.sequence_ids)
            for row in self._holding.values():
                if row.sequence_id not in batch and row.end is None:
                    self._set(row, column, IDLE)
        self._computed = computed[PREFILL], computed[DECODE], computed[PADDING]
        self.most_tokens = max(self.most_tokens, sum(self._computed))
        self._steady = batch_of(record) if steady and not self._late else None

    def _not_as_before(self, record: StepRecord) -> Sequence[int]:
        """The rows of a batch that may do another thing than draw one more token, as they did in the last step."""
        rows, decoding = range(len(record.sequence_ids)), self._decoding
        if NO_TOKEN in record.token_ids or record.num_accepted or len(record.token_ids) < len(rows):
            return rows
        return [index for index, sequence_id in enumerate(record.sequence_ids) if sequence_id not in decoding]

    def _drew(self, row: Row, drawn: int, record: StepRecord) -> None:
        self.most_drawn = max(self.most_drawn, drawn)
        if row.first_token_at is not None:
            return
        row.first_token_at = record.updated_at
        for follower in self._followers.pop(row.request_id, ()):  # their prompt is computed: who has no slot waits for one
            if follower.state == FOLLOWS and follower.index not in self._holding:
                self._set(follower, len(self), WAITING)

    # ------------------------------------------------------------------ reasons and counts

    def _note(self, decision: Decision, step: int) -> None:
        row = self.row_of.get(decision.sequence_id)
        if row is None:
            self._untold.setdefault(decision.sequence_id, []).append(decision)
            return
        text = describe(decision)
        if decision.kind not in _SAYS_NO_MORE:
            row.decisions.append((len(self), text))
        row.pauses = decision.kind == "waits_update"
        if cause_of(decision.kind) is not None and not row.pauses:
            if row.state == FOLLOWS:
                self._set(row, len(self), WAITING)
            self.holds.begin(row.index, len(self), step, decision.kind, text)

    def _set(self, row: Row, column: int, state: int, drawn: int = 0, num_new: int = 0) -> None:
        """All changes of rows go through here: the queue, the counts and the overview follow."""
        old = row.state
        row.set(column, (state, drawn, num_new))
        (self._decoding.add if (state, drawn, num_new) == (DECODE, 1, 0) else self._decoding.discard)(row.sequence_id)
        if old == state:
            return
        self._counts[old] -= 1
        self._counts[state] += 1
        self.overview.change(row.index, old, state)
        if old not in WITH_SLOT or state not in WITH_SLOT:
            self.presence.change(column, row.index)
        if state in QUEUE and old not in QUEUE:
            self._queue[row.index] = row
            self.holds.queued(row.index, column)
        elif old in QUEUE and state not in QUEUE:
            del self._queue[row.index]
            self.holds.left(row.index, column)
        if state in WAITS:
            self._waits.begin(row)

    def _count(self, record: StepRecord, state: State) -> None:
        """Close the column: blocks, tokens, and what everyone who waits waits for."""
        idle = [row for row in self._holding.values() if row.state == IDLE] if self._counts[IDLE] else []
        self._waits.count(self.holds.last, len(self._queue), len(self) - self._last_preemption, idle)
        self.num_drawn += len(record.token_ids) - record.token_ids.count(NO_TOKEN) + sum(record.num_accepted)
        self.padded_steps += self._counts[PADDING]
        self.slot_steps += sum(self._counts[state] for state in WITH_SLOT)
        self.started_at = record.scheduled_at if self.started_at is None else self.started_at
        self.ended_at = record.updated_at
        blocks = state.counts()
        self.columns.append(
            Column(
                record.step,
                *self._computed,
                *(blocks["owned"], blocks["shared"], blocks["cached"], state.swapped.num_used),
                sum(self._counts[FOLLOWS:]),
                *(self._num_requests, self._waits.num_requests, self._num_preemptions),
                tuple(self._waits.steps),
            )
        )
