"""CUDA graphs of checks, and of a draft model's steps: decodes of several tokens a row.

A graph is recorded for each number of tokens that may come, and a few numbers of rows. All rows of a step have as many
tokens: one that has fewer could be padded with tokens that nobody wrote, but then its own would meet keys and values that
nobody wrote, and a NaN among those stays one however little it weighs.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float
from torch import Tensor

from refimpl.executor.cuda_graphs import DecodeGraphs, DecodeStep, Recordings

CHECK_SIZES = [1, 2, 4, 8, 16, 32, 64]
"""Numbers of rows for graphs of several tokens a row: with more rows drafts seldom pay."""


class SeveralTokens:
    """A decode step of ``num_tokens`` tokens of each row."""

    def __init__(self, step: DecodeStep, num_tokens: int) -> None:
        self.step, self.num_tokens, self.device = step, num_tokens, step.device

    def forward(self, size: int) -> Float[Tensor, "T H"]:
        """Compute it for so many rows."""
        return self.step.forward(size, self.num_tokens)


class CheckGraphs:
    """Recordings of a decode step for each of ``sizes``, numbers of rows, and each of ``num_tokens``, both rising."""

    def __init__(self, step: DecodeStep, sizes: list[int], num_tokens: Sequence[int], pool: Any = None) -> None:
        self.step, self.sizes = step, sizes
        self._by_tokens: dict[int, Recordings[SeveralTokens]] = {}
        for several in sorted(num_tokens, reverse=True):
            self._by_tokens[several] = Recordings(SeveralTokens(step, several), sizes, pool)
            pool = self._by_tokens[several].pool
        self.num_tokens = sorted(num_tokens)

    def serves(self, counts: np.ndarray) -> bool:
        """Whether there is one for rows of so many tokens each."""
        return len(counts) <= self.sizes[-1] and bool((counts == counts[0]).all()) and int(counts[0]) in self.num_tokens

    def replay(self, slots: np.ndarray, contexts: np.ndarray, num_tokens: int) -> Float[Tensor, "S several H"]:
        """Hidden states of ``num_tokens`` tokens of each row. The next replay, of any size, may overwrite them."""
        self.step.write(slots, contexts)
        place = bisect.bisect_left(self.sizes, len(slots))
        hidden = self.run(num_tokens, place)
        several: Tensor = hidden.unflatten(0, (self.sizes[place], -1))
        return several[: len(slots)]

    def run(self, num_tokens: int, place: int) -> Float[Tensor, "T H"]:
        """Replay one recording."""
        return self._by_tokens[num_tokens].run(place)

    def release(self) -> None:
        """Give the memory back that lies between the kernels."""
        for recordings in self._by_tokens.values():
            recordings.release()


class DraftGraphs:
    """A draft model's steps: one token a row, and the two that a round leaves it behind."""

    def __init__(self, one: DecodeGraphs, two: CheckGraphs) -> None:
        self._one, self._two = one, two

    @classmethod
    def of(cls, step: DecodeStep, most_rows: int) -> DraftGraphs:
        """Record them."""
        sizes = [size for size in CHECK_SIZES if size <= most_rows]
        one = DecodeGraphs(step, sizes)
        return cls(one, CheckGraphs(step, sizes, [2], one.pool))

    def hidden(self, slots: np.ndarray, contexts: np.ndarray, count: int) -> Float[Tensor, "S H"] | None:
        """Hidden states of the rows' last tokens, of ``count`` that each computes; None where that is not recorded."""
        if count == 1 and len(slots) <= self._one.sizes[-1]:
            return self._one.replay(slots, contexts)
        if count == 2 and self._two.serves(np.full_like(contexts, 2)):
            return self._two.replay(slots, contexts, 2)[:, 1]
        return None

    def release(self) -> None:
        """Give the memory back that lies between the kernels."""
        self._one.release()
        self._two.release()
