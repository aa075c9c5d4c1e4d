"""RoundCosts: what a round of drafts costs, in steps without: from a few measured sizes to any."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping

import msgspec


class RoundCosts(msgspec.Struct, frozen=True):
    """Seconds that were measured.

    What a step takes depends on how many tokens it has, and hardly on how many sequences these are of: 8 rows with one draft
    cost as much as 2 with 7. So checks are told by tokens, which makes few measurements a dense curve; between two of its
    points, and beyond the last, it is a straight line.
    """

    step: dict[int, float]
    """Of a step without drafts, by batch size."""
    check: dict[int, float]
    """Of the model's part of a step with drafts, by its tokens: K + 1 a row."""
    draft: dict[int, dict[int, float]]
    """Of the proposer's part, by batch size, then by K."""

    def plain(self, num_sequences: int) -> float:
        """Seconds of a step without drafts."""
        return _on_line(self.step, num_sequences)

    def c(self, num_sequences: int, num_drafts: int) -> float:
        """The time of one draft of each row over that of a plain step."""
        drafting = {size: by_number[_nearest(by_number, num_drafts)] for size, by_number in self.draft.items()}
        return _on_line(drafting, num_sequences) / num_drafts / self.plain(num_sequences)

    def v(self, num_sequences: int, num_drafts: int) -> float:
        """The time of a check of so many drafts a row over that of a plain step: never under 1."""
        return max(1.0, _on_line(self.check, num_sequences * (num_drafts + 1)) / self.plain(num_sequences))

    def round_over_step(self, num_sequences: int, num_drafts: int) -> float:
        """What a round costs, in steps without drafts of as many sequences."""
        if not num_drafts:
            return 1.0
        return num_drafts * self.c(num_sequences, num_drafts) + self.v(num_sequences, num_drafts)


def _nearest(values: Mapping[int, float], number: int) -> int:
    return min(values, key=lambda known: (abs(known - number), known))


def _on_line(values: Mapping[int, float], x: int) -> float:
    """On the line through the two points that lie about x, or through the last two; under the first point, its value.

    A point above a later one was disturbed, as more work takes no less time: it counts as that one.
    """
    points = sorted(values)
    if x <= points[0] or len(points) == 1:
        return values[points[0]]
    upper = min(bisect_left(points, x), len(points) - 1)
    high = min(values[point] for point in points[upper:])
    low = min(values[points[upper - 1]], high)
    slope = (high - low) / (points[upper] - points[upper - 1])
    return low + slope * (x - points[upper - 1])
