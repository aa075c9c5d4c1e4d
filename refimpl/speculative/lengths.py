"""How many tokens to draft: a fixed number, or the one that pays best by what was accepted and what a round costs.

With acceptance rates a_1, a_2, … by place (a_i: the i-th draft is accepted, given that those before it were), a round of K
drafts brings 1 + a_1 + a_1·a_2 + … tokens, and costs as much as K·c + v(K + 1) steps without drafts. Both costs are measured
on the machine at the start, for a few batch sizes: at batch 1 the check of 6 tokens reads the same weights as a step of one,
and costs little more; at batch 64 it computes as much as it reads, and a K that paid no more pays nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

LADDER = (0, 1, 2, 3, 5, 8)
"""Numbers of drafts that are tried: their gains differ by more than what is known of them."""
FORGET = 0.98
"""By which each row's outcome makes all before it weigh less: about the last 50 rows count."""
PROBE_EVERY = 200
"""Steps without drafts after which a round is tried again, to see whether acceptance is better by now."""
PROBE_LEN = 1


def ladder(most: int, adaptive: bool = True) -> list[int]:
    """Numbers of drafts that may come, the most included, 0 left out."""
    return sorted({number for number in LADDER if 0 < number < most} | {most}) if adaptive else [most]


class RoundCosts(msgspec.Struct, frozen=True):
    """Seconds, by batch size, that were measured."""

    step: dict[int, float]
    """Of a step without drafts."""
    check: dict[int, dict[int, float]]
    """Of the model's part of a step with K drafts a row: by batch size, then by K."""
    draft: dict[int, dict[int, float]]
    """Of the proposer's part, likewise."""

    def round_over_step(self, num_sequences: int, num_drafts: int) -> float:
        """What a round costs, in steps without drafts of as many sequences; between batch sizes by a straight line."""
        if not num_drafts:
            return 1.0

        def at(size: int) -> float:
            return (self.check[size][num_drafts] + self.draft[size][num_drafts]) / self.step[size]

        return _between({size: at(size) for size in self.step}, num_sequences)


def _between(values: Mapping[int, float], x: int) -> float:
    points = sorted(values)
    upper = next((p for p in points if p >= x), points[-1])
    lower = max((p for p in points if p <= x), default=points[0])
    if upper <= lower:
        return values[upper if x >= upper else lower]
    return values[lower] + (values[upper] - values[lower]) * (x - lower) / (upper - lower)


class Acceptance:
    """Acceptance rates by place, from rows as they come; recent ones count more. Before any came, rates are ``prior``."""

    def __init__(self, prior: float = 0.6, weight: float = 4.0) -> None:
        self._tried = [weight] * LADDER[-1]
        self._accepted = [weight * prior] * LADDER[-1]

    def observe(self, num_drafts: int, num_accepted: int) -> None:
        """One row."""
        for place in range(min(num_drafts, num_accepted + 1, len(self._tried))):
            self._tried[place] = self._tried[place] * FORGET + 1
            self._accepted[place] = self._accepted[place] * FORGET + (place < num_accepted)

    def rates(self) -> list[float]:
        """Of each place, given that the drafts before it were accepted."""
        return [accepted / tried for accepted, tried in zip(self._accepted, self._tried, strict=True)]

    def tokens(self, num_drafts: int) -> float:
        """Expected tokens of a round."""
        expected, run = 1.0, 1.0
        for rate in self.rates()[:num_drafts]:
            run *= rate
            expected += run
        return expected


class FixedLength:
    """Always the same number."""

    def __init__(self, num_drafts: int) -> None:
        self.num_drafts = num_drafts
        self.acceptance = Acceptance()

    def choose(self, num_sequences: int) -> int:
        """The number."""
        return self.num_drafts

    def observe(self, num_drafts: int, num_accepted: int) -> None:
        """Kept for who asks."""
        self.acceptance.observe(num_drafts, num_accepted)


class AdaptiveLength:
    """The number of ``LADDER``, at most ``most``, that brings most tokens a second; 0 where none beats plain decoding."""

    def __init__(self, most: int, costs: RoundCosts) -> None:
        self.ladder = [0, *ladder(most)]
        self.costs = costs
        self.acceptance = Acceptance()
        self._steps_without = 0

    def speed_up(self, num_sequences: int, num_drafts: int) -> float:
        """Tokens a second over those of plain decoding, as predicted."""
        return self.acceptance.tokens(num_drafts) / self.costs.round_over_step(num_sequences, num_drafts)

    def choose(self, num_sequences: int) -> int:
        """The best; after many steps without drafts one is tried, so that better times are noticed."""
        best = max(self.ladder, key=lambda number: (self.speed_up(num_sequences, number), -number))
        self._steps_without = 0 if best else self._steps_without + 1
        if self._steps_without >= PROBE_EVERY:
            self._steps_without = 0
            return min(PROBE_LEN, self.ladder[-1])
        return best

    def observe(self, num_drafts: int, num_accepted: int) -> None:
        """What became of one row's drafts."""
        self.acceptance.observe(num_drafts, num_accepted)
