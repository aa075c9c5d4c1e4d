"""Rounds of speculation from event records: what was drafted for each sequence, what was accepted, and what it brought.

A round is a row of a step for which tokens were drafted and judged. A row for which the proposer found nothing is a round of
0 drafts. Where a request ends within an accepted run, the log tells no verdict on what stood behind its end.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from refimpl.events import RowKinds, StepRecord
from refimpl.outputs import NO_TOKEN
from refimpl.visualizers.state import State
from refimpl.visualizers.tail import Tail

MOST_DRAFTS = 15
"""Of one round; further ones are counted as this."""


class Round(NamedTuple):
    """One row's drafts and what became of them."""

    position: int
    """Of the record."""
    step: int
    sequence_id: int
    letter: str
    request_id: str
    hue: int | None
    drafts: Sequence[str]
    """Texts of all that were drafted."""
    num_accepted: int
    drawn: str | None
    """The text of the token behind the accepted ones; None where the request ended before it."""


class StepTokens(NamedTuple):
    """What one step brought to the sequences that decode."""

    num_drafts: int
    """The most that were planned for a row."""
    num_rows: int
    """Sequences that decode and got a token."""
    num_tokens: int
    """What they got together."""


@dataclass(frozen=True)
class Outcomes:
    """Counts over some rounds. ``table[m, a, d]`` are those of m drafts, a of them accepted; d = 1: with a token drawn."""

    table: np.ndarray[Any, Any]

    @property
    def num_rounds(self) -> int:
        """All of them."""
        return int(self.table.sum())

    @property
    def num_tokens(self) -> int:
        """What they brought: accepted drafts, and the tokens drawn behind them."""
        _, accepted, drew = np.indices(self.table.shape)
        return int((self.table * (accepted + drew)).sum())

    @property
    def num_drafts(self) -> int:
        """Tokens drafted in them."""
        return int((self.table * np.indices(self.table.shape)[0]).sum())

    @property
    def num_accepted(self) -> int:
        """Of those, the ones that were accepted."""
        return int((self.table * np.indices(self.table.shape)[1]).sum())

    @property
    def num_cut(self) -> int:
        """Rounds that an end of their request cut short."""
        return int(self.table[:, :, 0].sum())

    def with_drafts(self) -> Outcomes:
        """Less the rounds for which nothing was drafted."""
        table = self.table.copy()
        table[0] = 0
        return Outcomes(table)

    def places(self) -> list[tuple[int, int]]:
        """(judged, accepted) for the 1st, the 2nd, … draft of a round. Judged are those before which all were accepted."""
        found = []
        for place in range(1, len(self.table)):
            accepted = int(self.table[place:, place:].sum())
            refused = int(self.table[place:, place - 1, 1].sum())
            if not accepted + refused:
                break
            found.append((accepted + refused, accepted))
        return found

    def predicted(self, num_drafts: int) -> float:
        """Tokens of a round by the acceptance rates: 1 + α₁ + α₁·α₂ + …"""
        expected, run = 1.0, 1.0
        for judged, accepted in self.places()[:num_drafts]:
            run *= accepted / judged
            expected += run
        return expected

    def by_length(self) -> list[tuple[int, int, int, float]]:
        """(drafts, rounds, tokens, tokens a round as predicted) for each number of drafts that a round had."""
        numbers = np.flatnonzero(self.table.sum(axis=(1, 2))).tolist()
        parts = [(number, Outcomes(_only(self.table, number))) for number in numbers]
        return [(number, part.num_rounds, part.num_tokens, self.predicted(number)) for number, part in parts]


def _only(table: np.ndarray[Any, Any], number: int) -> np.ndarray[Any, Any]:
    chosen = np.zeros_like(table)
    chosen[number] = table[number]
    return chosen


class SpeculationFold:
    """What a history's records say about drafts: a :class:`refimpl.visualizers.history.Fold`.

    Args:
        config: the log header's ``config``.
        state: where the records begin at position ``first`` and not with the run, the state before.

    """

    def __init__(self, config: dict[str, Any], state: State | None = None, first: int = 0) -> None:
        self.rounds: Tail[Round] = Tail()
        """In order of the log."""
        self.num_rounds: Tail[int] = Tail(first=first)
        """For each record, how many rounds there were up to it."""
        self.steps: Tail[StepTokens] = Tail(first=first)
        """For each record."""
        self._codes = array("h")
        """Of each round that is kept: its drafts, those accepted, and whether a token was drawn, in one number."""
        self._kinds = RowKinds(() if state is None else state.prefilling())

    def forget(self, first: int) -> None:
        """Let go of what is told by records before a position only."""
        if first <= self.num_rounds.first:
            return
        gone = self.num_rounds[first - 1]
        del self._codes[: gone - self.rounds.first]
        self.rounds.forget(gone)
        self.num_rounds.forget(first)
        self.steps.forget(first)

    def apply(self, record: StepRecord, state: State) -> None:
        """Take the next record of the log; ``state`` is that after it."""
        kinds = self._kinds.of(record)
        if record.num_drafts:
            self._take_rounds(record, state)
        accepted: Sequence[int] = record.num_accepted or (0,) * len(record.token_ids)
        got = [
            number + (token != NO_TOKEN)
            for kind, token, number in zip(kinds, record.token_ids, accepted, strict=False)
            if kind == "decode"
        ]
        self.steps.append(StepTokens(max(record.num_drafts, default=0), len(got) - got.count(0), sum(got)))
        self.num_rounds.append(len(self.rounds))

    def _take_rounds(self, record: StepRecord, state: State) -> None:
        columns = (record.num_drafts, record.draft_texts, record.num_accepted, record.token_ids, record.token_texts)
        for sequence_id, planned, drafts, num_accepted, token, text in zip(record.sequence_ids, *columns, strict=True):
            drew = token != NO_TOKEN
            if not planned or not (num_accepted or drew):  # it had ended before, or its logits were no numbers
                continue
            known = state.sequences.get(sequence_id)
            letter, request_id = (
                (known.letter, known.request_id) if known else (f"?{sequence_id}", f"sequence {sequence_id}")
            )
            who = (sequence_id, letter, request_id, known.hue if known else None)
            drawn = text if drew else None
            self.rounds.append(Round(len(self.steps), record.step, *who, drafts, num_accepted, drawn))
            self._codes.append((min(len(drafts), MOST_DRAFTS) << 5) + (min(num_accepted, MOST_DRAFTS) << 1) + drew)

    def outcomes(self, position: int) -> Outcomes:
        """Of the rounds up to a record, less those forgotten."""
        size = self._count(position) - self.rounds.first
        codes = np.frombuffer(self._codes[: max(0, size)], dtype=np.int16)
        table = np.bincount(codes, minlength=32 * (MOST_DRAFTS + 1))
        return Outcomes(table.reshape(MOST_DRAFTS + 1, MOST_DRAFTS + 1, 2))

    def newest(self, position: int, most: int) -> list[Round]:
        """The last rounds up to a record, at most so many."""
        end = self._count(position)
        return self.rounds[max(self.rounds.first, end - most) : end]

    def _count(self, position: int) -> int:
        position = min(position, len(self.num_rounds) - 1)
        return self.num_rounds[position] if position >= self.num_rounds.first else self.rounds.first
