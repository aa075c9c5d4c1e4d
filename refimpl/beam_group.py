"""BeamGroup: the search itself, as arithmetic on log-probabilities. Who computes them, and where, it does not know.

A beam of width W keeps the W most probable texts. Each step every one of them proposes its most probable next tokens; of all
these continuations the best ``candidates`` are looked at, in order. One that ends the text is a finished hypothesis if it is
among the first W; the first W others go on. Log-probabilities are summed in float64, the rules are those of transformers'
``num_beams`` (version 5).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from refimpl.beam_params import BeamSearchParams

Proposals = Sequence[tuple[int, float]]
"""Next tokens of one beam with their log-probabilities, the most probable first."""


@dataclass(frozen=True)
class Continuation:
    """A beam and its next token."""

    beam: int
    """Of those that ran."""
    token_id: int
    logprob: float
    """Sum of the log-probabilities of all its output tokens."""


@dataclass(frozen=True)
class Hypothesis:
    """A finished text."""

    token_ids: tuple[int, ...]
    """Its output tokens, the one that ended it included."""
    logprob: float
    """Sum of their log-probabilities."""
    score: float
    reason: Literal["stop", "length"]


class Endings(Protocol):
    """Tells which continuations end a text. Like the search, it knows what each running beam has drawn."""

    stop_ids: frozenset[int]
    """Ids that end any text."""

    def ends(self, continuation: Continuation) -> bool:
        """Whether the beam's text ends with that token."""

    def go_on(self, continuations: Sequence[Continuation]) -> None:
        """These are the beams that run from here on, best first."""


class StopIds:
    """Where nothing but ids ends a text."""

    def __init__(self, stop_ids: frozenset[int]) -> None:
        self.stop_ids = stop_ids

    def ends(self, continuation: Continuation) -> bool:
        """Whether it is one of the ids."""
        return continuation.token_id in self.stop_ids

    def go_on(self, continuations: Sequence[Continuation]) -> None:
        """Nothing is to be remembered."""


def num_candidates(width: int, stop_ids: frozenset[int]) -> int:
    """Proposals that a beam must make, and continuations that are looked at: W are left to go on, whichever ids end a text.

    How many a stop string ends is not known before. Where it ends so many that fewer than W are left, fewer go on.
    """
    return max(2, 1 + len(stop_ids)) * width


class BeamGroup:
    """The state of one search.

    Args:
        params: how to search.
        max_tokens: the most output tokens, where the context ends before ``params.max_tokens``.
        endings: what ends a text.
        first_sequence_id: of the ids that are set aside for the beams and the hypotheses.

    """

    def __init__(self, params: BeamSearchParams, max_tokens: int, endings: Endings, first_sequence_id: int) -> None:
        self.params = params
        self.width = params.beam_width
        self.max_tokens = max_tokens
        self.endings = endings
        self.num_candidates = num_candidates(self.width, endings.stop_ids)
        self.finished: list[Hypothesis] = []
        """The best ``width`` finished ones, best first."""
        self.done = False
        self.first_sequence_id = first_sequence_id
        self.pending: dict[int, Proposals] = {}
        """What beams have proposed in this step of the search, by sequence id."""
        self.times: list[float] = []
        """When each step of the search was taken, in seconds of the engine's clock."""
        self._num_taken = 1  # the first beam
        self._outputs: list[tuple[int, ...]] = [()]
        """What each running beam has drawn, best first."""
        self._logprobs: list[float] = [0.0]

    @property
    def num_ids(self) -> int:
        """Sequence ids that a search may need: for every beam of every step, and the hypotheses."""
        return 1 + self.width * (self.max_tokens + 1)

    def take_number(self) -> int:
        """The number of a new beam or hypothesis."""
        self._num_taken += 1
        return self._num_taken - 1

    def advance(self, proposals: Sequence[Proposals]) -> list[Continuation]:
        """Take one step: from the proposals of each running beam to the beams that run from here on, best first.

        Args:
            proposals: of each beam, in the order in which they were returned last (at first there is one).

        Returns:
            The next beams; none when the search is done.

        """
        best = self._best(proposals)
        length = len(self._outputs[0]) + 1
        at_limit = length >= self.max_tokens
        going, ended = [], []
        for rank, continuation in enumerate(best):
            stops = self.endings.ends(continuation)
            if (stops or at_limit) and rank < self.width:
                ended.append(self._hypothesis(continuation, length, "stop" if stops else "length"))
            if not stops and not at_limit:
                going.append(continuation)
        if not (self.params.early_stopping is True and len(self.finished) == self.width):
            self.finished = heapq.nlargest(self.width, self.finished + ended, key=lambda hypothesis: hypothesis.score)
        going = going[: self.width]
        self.endings.go_on(going)
        self._outputs = [(*self._outputs[c.beam], c.token_id) for c in going]
        self._logprobs = [c.logprob for c in going]
        self.done = not going or self._cannot_improve(length)
        return [] if self.done else going

    def give_up(self) -> None:
        """End the search here: the beams that run become hypotheses as they are, where there are too few finished ones."""
        running = [
            Hypothesis(output, logprob, self._score(logprob, len(output)), "length")
            for output, logprob in zip(self._outputs, self._logprobs, strict=True)
        ]
        self.finished = (self.finished + sorted(running, key=lambda h: -h.score))[: self.width]
        self.finished.sort(key=lambda hypothesis: -hypothesis.score)
        self.done = True

    def _best(self, proposals: Sequence[Proposals]) -> list[Continuation]:
        every = [
            Continuation(beam, token_id, self._logprobs[beam] + logprob)
            for beam in range(len(self._outputs))
            for token_id, logprob in proposals[beam]
        ]
        # Where sums tie, the better beam's goes first, then the lower id.
        every.sort(key=lambda c: (-c.logprob, c.beam, c.token_id))
        return every[: self.num_candidates]

    def _hypothesis(self, continuation: Continuation, length: int, reason: Literal["stop", "length"]) -> Hypothesis:
        output = (*self._outputs[continuation.beam], continuation.token_id)
        return Hypothesis(output, continuation.logprob, self._score(continuation.logprob, length), reason)

    def _score(self, logprob: float, length: int) -> float:
        return float(logprob / length**self.params.length_penalty) if length else logprob

    def _cannot_improve(self, length: int) -> bool:
        """Whether ``width`` hypotheses are finished, and no running beam is hoped to score higher."""
        if len(self.finished) < self.width:
            return False
        if self.params.early_stopping is True:
            return True
        longest = self.params.early_stopping == "never" and self.params.length_penalty > 0
        best_possible = self._score(self._logprobs[0], self.max_tokens if longest else length)
        return best_possible <= self.finished[-1].score
