"""How many tokens to draft: a fixed number, or the one that pays best by what was accepted and what a round costs.

With acceptance rates a_1, a_2, … by place (a_i: the i-th draft is accepted, given that those before it were), a round of K
drafts brings 1 + a_1 + a_1·a_2 + … tokens, and costs as much as K·c + v(K + 1) steps without drafts
(:mod:`refimpl.speculative.law`). Both costs are measured on the machine (:mod:`refimpl.speculative.costs`): at batch 1 the
check of 6 tokens reads the weights once, as a step of one does; at batch 64 it computes as much as it reads, and a K that
paid at batch 1 pays nothing.
"""

from __future__ import annotations

from itertools import accumulate
from operator import mul

from refimpl.speculative.costs import RoundCosts
from refimpl.speculative.law import LADDER

FORGET = 0.98
"""By which a step's outcomes make all before them weigh less: about the last 50 steps count, however many rows each had."""
LEAST_WEIGHT = 4.0
"""Outcomes that are remembered, however long ago they were, until there are others."""
PROBE_AFTER = (200, 1600)
"""Steps without drafts after which acceptance is looked at again: the first time, and at most. It doubles in between."""
PROBE_ROWS = 8
"""Outcomes that are looked at then, at one draft each, and the most rows of a step that draft for it."""
LEAST_GAIN = 0.02
"""What another number must bring over the present one, so that what is not known exactly does not make it flicker."""


def ladder(most: int, adaptive: bool = True) -> list[int]:
    """Numbers of drafts that may come, the most included, 0 left out."""
    return sorted({number for number in LADDER if 0 < number < most} | {most}) if adaptive else [most]


class Acceptance:
    """Acceptance rates by place, from rows as they come; those of recent steps count more.

    Of a place that few drafts came to, little is known: its rate is drawn towards that of the place before it, and equals it
    where there is nothing else to go by. The first place's is ``prior`` until something came.
    """

    def __init__(self, places: int = LADDER[-1], prior: float = 0.6) -> None:
        self._tried = [0.0] * places
        self._accepted = [0.0] * places
        self._tried[0], self._accepted[0] = LEAST_WEIGHT, LEAST_WEIGHT * prior

    def observe(self, num_drafts: int, num_accepted: int) -> None:
        """One row."""
        for place in range(min(num_drafts, num_accepted + 1, len(self._tried))):
            self._tried[place] += 1
            self._accepted[place] += place < num_accepted

    def end_step(self) -> None:
        """What came so far weighs less from now on, the first place's never less than ``LEAST_WEIGHT``."""
        for place, tried in enumerate(self._tried):
            kept = FORGET if place or tried * FORGET >= LEAST_WEIGHT else min(1.0, LEAST_WEIGHT / tried)
            self._tried[place] *= kept
            self._accepted[place] *= kept

    def rates(self) -> list[float]:
        """Of each place, given that the drafts before it were accepted."""
        rates: list[float] = []
        for accepted, tried in zip(self._accepted, self._tried, strict=True):
            drawn = LEAST_WEIGHT if rates else 0.0
            rates.append((accepted + drawn * (rates[-1] if rates else 0.0)) / (tried + drawn))
        return rates


class FixedLength:
    """Always the same number."""

    def __init__(self, num_drafts: int) -> None:
        self.num_drafts = num_drafts

    def choose(self, num_sequences: int) -> tuple[int, int]:
        """The number, for all."""
        return self.num_drafts, num_sequences

    def observe(self, num_drafts: int, num_accepted: int) -> None:
        """It changes nothing."""


class AdaptiveLength:
    """The number of ``LADDER``, at most ``most``, that brings most tokens a second; 0 where none beats plain decoding.

    While it is 0, acceptance is looked at now and then (a probe): a few rows draft one token each, until ``PROBE_ROWS``
    outcomes are known. A draft model has then to catch up with these rows alone.
    """

    def __init__(self, most: int, costs: RoundCosts) -> None:
        self.ladder = [0, *ladder(most)]
        self.costs = costs
        self._rounds: dict[int, dict[int, float]] = {}
        """``costs`` by batch size and number, as far as they were asked for."""
        self.acceptance = Acceptance(most)
        self._now = 0
        self._waited, self._wait = 0, PROBE_AFTER[0]
        self._to_see = 0
        """Outcomes that a probe still waits for."""

    def speed_ups(self, num_sequences: int) -> dict[int, float]:
        """Tokens a second over those of plain decoding, as predicted, by number of drafts."""
        if (rounds := self._rounds.get(num_sequences)) is None:
            rounds = {number: self.costs.round_over_step(num_sequences, number) for number in self.ladder}
            self._rounds[num_sequences] = rounds
        tokens = list(accumulate(accumulate(self.acceptance.rates(), mul), initial=1.0))
        return {number: tokens[number] / cost for number, cost in rounds.items()}

    def choose(self, num_sequences: int) -> tuple[int, int]:
        """The number for the next step, and the most sequences that draft."""
        self.acceptance.end_step()
        gains = self.speed_ups(num_sequences)
        best = max(self.ladder, key=lambda number: (gains[number], -number))
        if gains[best] > gains[self._now] + LEAST_GAIN or gains[self._now] < 1:
            self._now = best
        if self._now:
            self._waited, self._wait, self._to_see = 0, PROBE_AFTER[0], 0
            return self._now, num_sequences
        return self._probe(num_sequences)

    def _probe(self, num_sequences: int) -> tuple[int, int]:
        """A step while nothing pays, as far as is known."""
        if self._to_see <= 0:
            self._waited += 1
            if self._waited < self._wait:
                return 0, 0
            self._waited, self._wait, self._to_see = 0, min(2 * self._wait, PROBE_AFTER[1]), PROBE_ROWS
        return 1, min(num_sequences, PROBE_ROWS)

    def observe(self, num_drafts: int, num_accepted: int) -> None:
        """What became of one row's drafts."""
        self._to_see -= 1
        self.acceptance.observe(num_drafts, num_accepted)
