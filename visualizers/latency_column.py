"""Column: seconds in the order of a log, and the exact quantiles and the bars of any prefix of them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

SHORTEST = 1e-6
"""Seconds; what is shorter counts as this, since a logarithmic axis has no 0."""
BARS_PER_DECADE = 24
_SLICES = 20
"""Fine bins in a bar: a quantile is found in one of them, exactly."""
_NUM_BARS = 10 * BARS_PER_DECADE


class Column:
    """Seconds in order of the log, and the distribution of any prefix of them."""

    def __init__(self) -> None:
        self._low, self._high = float("inf"), 0.0
        self._new: list[float] = []
        """Not sorted into bins yet: that is done for many at a time."""
        self._times: list[int] = []
        """How often each of them is to be counted."""
        self._num_new = 0
        self._seconds = np.empty(1024)
        self._bins = np.empty(1024, dtype=np.int16)
        """Fine bins: 16 bits hold the numbers of all."""
        self._counts = np.zeros(_NUM_BARS * _SLICES, dtype=np.int64)
        """By fine bin, those that are kept."""
        self._lowest, self._highest = np.full(len(self._counts), np.inf), np.zeros(len(self._counts))
        """By fine bin, of all there ever were."""
        self._size = 0
        self._first = 0
        """How many are forgotten."""

    def __len__(self) -> int:
        return self._first + self._size + self._num_new

    @property
    def low(self) -> float:
        """The lowest of all there ever were; infinite where there were none."""
        self._take_in()
        return self._low

    @property
    def high(self) -> float:
        """The highest of all there ever were."""
        self._take_in()
        return self._high

    def forget(self, first: int) -> None:
        """Let go of all before the ``first``-th."""
        self._take_in()
        gone = first - self._first
        self._counts -= np.bincount(self._bins[:gone], minlength=len(self._counts))
        self._seconds, self._bins = self._seconds[gone:].copy(), self._bins[gone:].copy()
        self._first, self._size = first, self._size - gone

    def extend(self, values: list[float]) -> None:
        """Append some."""
        self._new += values
        self._times += [1] * len(values)
        self._num_new += len(values)

    def repeat(self, value: float, times: int) -> None:
        """Append one, so many times."""
        self._new.append(value)
        self._times.append(times)
        self._num_new += times

    def _take_in(self) -> None:
        if not self._new:
            return
        new = np.maximum(np.asarray(self._new), SHORTEST)
        fine = (np.log10(new) - np.log10(SHORTEST)) * (BARS_PER_DECADE * _SLICES)
        bins = np.clip(fine, 0, len(self._counts) - 1).astype(np.int16)
        end = self._size + self._num_new
        if end > len(self._seconds):
            self._seconds = np.resize(self._seconds, 2 * end)
            self._bins = np.resize(self._bins, 2 * end)
        self._seconds[self._size : end] = np.repeat(new, self._times)
        self._bins[self._size : end] = np.repeat(bins, self._times)
        self._counts += np.bincount(self._bins[self._size : end], minlength=len(self._counts))
        np.minimum.at(self._lowest, bins, new)
        np.maximum.at(self._highest, bins, new)
        self._size, self._num_new = end, 0
        self._new.clear()
        self._times.clear()
        self._low, self._high = min(self._low, float(new.min())), max(self._high, float(new.max()))

    def distribution(self, size: int) -> dict[str, Any]:
        """Of the first ``size`` ones, less those forgotten: how many, exact quantiles, and bars.

        ``bars`` counts them from bar ``first_bar`` on; bar b begins at ``SHORTEST * 10 ** (b / BARS_PER_DECADE)`` seconds.
        """
        self._take_in()
        size -= self._first
        if size <= 0:
            return {"count": 0, "p50": None, "p99": None, "first_bar": 0, "bars": []}
        newest = size == self._size
        counts = self._counts if newest else np.bincount(self._bins[:size], minlength=len(self._counts))
        bars = counts.reshape(_NUM_BARS, _SLICES).sum(axis=1)
        used = np.flatnonzero(bars)
        ends = np.cumsum(counts)
        return {
            "count": size,
            "p50": self._quantile(size, ends, 0.5),
            "p99": self._quantile(size, ends, 0.99),
            "first_bar": int(used[0]),
            "bars": bars[used[0] : used[-1] + 1].tolist(),
        }

    def _quantile(self, size: int, ends: Any, share: float) -> float:
        """Between the two neighbouring values, as numpy's: linear.

        They are in the fine bins where the counts pass their ranks.
        """
        rank = (size - 1) * share
        low, high = int(rank), min(int(rank) + 1, size - 1)
        first, last = np.searchsorted(ends, (low, high), side="right")  # between these two fine bins all are empty
        if math.isclose(self._lowest[first], self._highest[last], rel_tol=1e-9):  # steps of a virtual clock
            return float(self._lowest[first])
        chosen = self._bins[:size] == first
        if last != first:
            chosen |= self._bins[:size] == last
        values, before = self._seconds[:size][chosen], int(ends[first - 1]) if first else 0
        a, b = np.partition(values, (low - before, high - before))[[low - before, high - before]]
        return float(a + (b - a) * (rank - low))
