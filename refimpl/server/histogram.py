"""Histogram: values by some rising upper bounds, as Prometheus counts them."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate


class Histogram:
    """Values by the first of some rising upper bounds that they do not exceed, and their sum."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Take a value, or several that are equal."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def cumulative(self) -> tuple[list[int], float]:
        """How many values there are up to each bound, all of them last; and their sum."""
        return list(accumulate(self.counts)), self.total
