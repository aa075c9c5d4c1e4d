"""Drafting: how many tokens are drafted for which row of a step, and what becomes of them when their check is known.

A check of drafts is an ordinary row of K + 1 tokens. When it is planned, all K count as computed, as if they would be
accepted, and slots are taken for them. The update knows which were refused: then the sequence counts as many tokens less,
and blocks that held nothing else are given back. At depth 1 a further step has been planned by then, that much too far on
in the host's books; the executor, which knows the lengths on its device, computes the right positions.
"""

from __future__ import annotations

from typing import Protocol

from refimpl.request import Sequence, Status
from refimpl.scheduler.decisions import DecisionLog


class DraftLength(Protocol):
    """Says how many tokens to draft a sequence. A fixed number, or one that follows what was accepted."""

    def choose(self, num_sequences: int) -> tuple[int, int]:
        """Of so many sequences: tokens to draft for each in the next step, 0 for none, and for how many of them at most."""

    def observe(self, num_drafts: int, num_accepted: int) -> None:
        """One row had so many drafts, of which the first ``num_accepted`` were accepted."""


class Drafting:
    """The drafts of a step's rows. Without a ``length`` there are none."""

    def __init__(self, length: DraftLength | None, max_draft_len: int | None = None) -> None:
        self.length = length
        self._max_draft_len = max_draft_len
        """The most tokens of a sequence that the proposer can read."""
        self._num_drafts = self._rows_left = 0

    def begin_step(self, num_running: int, budget: int) -> int:
        """Choose the number for the next step, so low that every running sequence has room in the budget."""
        self._num_drafts = 0
        if self.length is not None and num_running:
            num_drafts, self._rows_left = self.length.choose(num_running)
            self._num_drafts = max(0, min(num_drafts, budget // num_running - 1))
        return self._num_drafts

    def of_row(self, sequence: Sequence, num_new_tokens: int, budget: int, max_model_len: int, log: DecisionLog) -> int:
        """Drafts for a sequence that would compute ``num_new_tokens``: only a decode has any.

        They may reach beyond its end, where they are cut off: rows of equally many tokens are one recorded step on a GPU.
        """
        if not self._num_drafts or not self._rows_left or num_new_tokens != 1 or not sequence.drafts:
            return 0
        num_tokens = sequence.num_tokens
        if num_tokens <= sequence.num_prompt_tokens:  # its first token is not ordered yet
            return 0
        if num_tokens - sequence.num_computed_tokens > 1:  # a chunk of one token, of a sequence that is computed again
            return 0
        if self._max_draft_len is not None and num_tokens + self._num_drafts > self._max_draft_len:
            stop_drafting(sequence, log, f"the draft model reads at most {self._max_draft_len} tokens")
            return 0
        num_drafts = max(0, min(self._num_drafts, budget - 1, max_model_len - num_tokens - 1))
        self._rows_left -= bool(num_drafts)
        return num_drafts

    def settle(self, sequence: Sequence, num_planned: int, num_drafts: int, num_accepted: int) -> int:
        """A check is known. Returns how many tokens its sequence counts less, where it still runs."""
        sequence.num_tokens_in_flight -= num_planned
        if self.length is not None and num_drafts:
            self.length.observe(num_drafts, num_accepted)
        refused = num_planned - num_accepted
        if sequence.status is not Status.RUNNING:  # it gave way meanwhile, and counts from 0
            return 0
        sequence.num_computed_tokens -= refused
        if refused:
            sequence.quiet_until = 0
        return refused


def stop_drafting(sequence: Sequence, log: DecisionLog, cause: str) -> None:
    """A sequence goes on without drafts, and its story says why."""
    sequence.drafts = False
    log.add(sequence, "drafts_no_more", cause=cause)
