"""The sampler: one token a row of logits, by one uniform number and the inverse of the cumulative distribution.

A row's way::

    raw logits ── adjustments ──┬─ greedy ── argmax ──────────────────────────────────────────────────────────────► token
        │    (masks, bias,      │                                                                                     ▲
        │  penalties, hooks)    └─ / temperature ─ min_p ─ top_k, top_p ─ softmax ─► cumulative sum ─ first past u · total
        └──► log-probabilities, of the raw logits

The uniform number ``u`` is a function of (seed, path, position): see :mod:`refimpl.kernels.philox`. The adjustments are
functions of the row's tokens: see :mod:`refimpl.sampling.adjustments`. So the token drawn does not depend on the batch, on
the order of requests, or on what was recomputed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from refimpl.kernels.philox import Purpose, uniform
from refimpl.kernels.reference import at_least_float32
from refimpl.outputs import BAD_LOGITS, NOTHING_LEFT
from refimpl.sampling.adjustments import Adjustments, adjust
from refimpl.sampling.filters import min_p_filter, top_k_top_p_by_head


@dataclass(frozen=True)
class SamplingRows:
    """The sampling parameters of the rows that draw a token, and which rows need which work (known to the host)."""

    temperature: Float[Tensor, "R"]
    top_p: Float[Tensor, "R"]
    top_k: Int64[Tensor, "R"]
    min_p: Float[Tensor, "R"]
    seed: Int64[Tensor, "R"]
    path: Int64[Tensor, "R"]
    position: Int64[Tensor, "R"]
    """The index in its sequence of the token that is drawn."""
    random: list[int]
    """Rows that are not greedy."""
    filtered: bool
    """Whether any of them has a filter on."""
    ranked: bool = False
    """Whether any of them has top-k or top-p on."""
    largest_top_k: int = 0
    """The largest number of tokens that one of them keeps by top-k; 0 where none does."""
    adjustments: Adjustments | None = None
    """What is done to the logits of some rows first."""

    def select(self, rows: Int64[Tensor, "R2"]) -> SamplingRows:
        """Some of the rows, all random, without their adjustments."""
        return SamplingRows(
            temperature=self.temperature[rows],
            top_p=self.top_p[rows],
            top_k=self.top_k[rows],
            min_p=self.min_p[rows],
            seed=self.seed[rows],
            path=self.path[rows],
            position=self.position[rows],
            random=list(range(len(rows))),
            filtered=self.filtered,
            ranked=self.ranked,
            largest_top_k=self.largest_top_k,
        )


@dataclass(frozen=True)
class Sampled:
    """What the sampler made of a step's rows."""

    token_ids: Int64[Tensor, "R"]
    """The tokens drawn; ``BAD_LOGITS`` where a row's raw logits hold NaN or +inf, or no finite number at all, and
    ``NOTHING_LEFT`` where the adjustments took the last finite one."""
    failures: dict[int, str] = field(default_factory=dict)
    """Rows whose logits hook failed, with a sentence about it; their tokens are of no use."""


class Sampler:
    """Draws tokens, and counts what it could not do the short way."""

    def __init__(self) -> None:
        self.num_rows_sorted = 0
        """Rows whose whole vocabulary was sorted for top-k or top-p, because the head of the ranking did not do."""

    def sample(self, logits: Float[Tensor, "R V"], rows: SamplingRows) -> Sampled:
        """One token a row. Greedy rows take the argmax, the lowest id where several tie; 16 bits are widened to float32."""
        raw = at_least_float32(logits)
        logits, failures = (raw, {}) if rows.adjustments is None else adjust(raw, rows.adjustments)
        token_ids = logits.argmax(-1)
        if rows.random:
            random = torch.tensor(rows.random, device=logits.device)
            chosen = rows.select(random)
            token_ids[random] = draw(self.probabilities(logits[random], chosen), chosen)
        if logits is not raw:
            token_ids = torch.where(usable(logits), token_ids, NOTHING_LEFT)
        return Sampled(torch.where(usable(raw), token_ids, BAD_LOGITS), failures)

    def probabilities(self, logits: Float[Tensor, "R V"], rows: SamplingRows) -> Float[Tensor, "R V"]:
        """The distribution that tokens are drawn from, after temperature and filters.

        The maximum is subtracted before the division, so a tiny temperature sends the others to −inf and overflows nothing.
        """
        scaled = (logits - logits.amax(-1, keepdim=True)) / rows.temperature.to(logits.dtype).unsqueeze(-1)
        if rows.filtered:
            scaled = min_p_filter(scaled, rows.min_p)
        if rows.ranked:
            scaled, num_sorted = top_k_top_p_by_head(scaled, rows.top_k, rows.top_p, rows.largest_top_k)
            self.num_rows_sorted += num_sorted
        return scaled.softmax(-1)


def usable(logits: Float[Tensor, "R V"]) -> Bool[Tensor, "R"]:
    """Rows whose largest logit is a finite number: NaN and +inf are larger than any, and all −inf leaves none."""
    return logits.amax(-1).isfinite()


def draw(probabilities: Float[Tensor, "R V"], rows: SamplingRows) -> Int64[Tensor, "R"]:
    """Inverse CDF in vocabulary order: the first token whose cumulative probability exceeds ``u`` times the total."""
    u = uniform(rows.seed, rows.path, rows.position, Purpose.TARGET)
    cumulative = probabilities.cumsum(-1, dtype=torch.float64)
    threshold = (u * cumulative[:, -1]).unsqueeze(-1)
    # A token of probability 0 never is the first to exceed anything. The clamp is for rows of NaN, which are refused.
    return torch.searchsorted(cumulative, threshold, right=True).squeeze(-1).clamp(max=probabilities.shape[-1] - 1)
