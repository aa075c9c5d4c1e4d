"""The sampler: one token a row of logits, by one uniform number and the inverse of the cumulative distribution.

A row's way::

    raw logits ── adjustments ──┬─ greedy ── argmax ──────────────────────────────────────────────────────────────► token
        │    (masks, bias,      │                                                                                     ▲
        │  penalties, hooks)    └─ / temperature ─ min_p ─ softmax ─ top_k, top_p ─► cumulative sum ─ first past u · total
        └──► log-probabilities, of the raw logits

As ``u`` is multiplied by the sum of what top-k and top-p left, that need not sum to 1. The cumulative sum goes in the order
of the vocabulary. What was dropped adds nothing to it, so it is made over the few candidates alone that
:func:`refimpl.sampling.filters.kept_by_head` finds.

The uniform number ``u`` is a function of (seed, path, position): see :mod:`refimpl.kernels.philox`. The adjustments are
functions of the row's tokens: see :mod:`refimpl.sampling.adjustments`. So the token drawn does not depend on the batch, on
the order of requests, or on what was recomputed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor

from refimpl.kernels.by_triton import by_triton
from refimpl.kernels.philox import Purpose, uniform
from refimpl.kernels.reference import at_least_float32
from refimpl.kernels.transfer import to_device
from refimpl.outputs import BAD_LOGITS, NOTHING_LEFT
from refimpl.sampling.adjustments import Adjustments, adjust
from refimpl.sampling.filters import HEAD, kept_by_head, min_p_filter
from refimpl.sampling.ranking import argmax


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
    whole: list[int]
    """Rows that draw from the whole vocabulary. Rows that are neither here nor in ``ranked`` are greedy."""
    ranked: list[int]
    """Rows that draw with top-k or top-p."""
    min_p_on: bool
    """Whether min-p is on in any of them."""
    largest_top_k: int = 0
    """The largest number of tokens that one of them keeps by top-k; 0 where none does."""
    adjustments: Adjustments | None = None
    """What is done to the logits of some rows first."""


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
        self.num_rows_beyond_head = 0
        """Rows for whose top-k or top-p more than ``HEAD`` ranks were looked at; the kernel has no head, and none are."""
        self.num_rows_sorted = 0
        """Rows whose whole vocabulary was sorted, because no head of it did."""

    def sample(self, logits: Float[Tensor, "R V"], rows: SamplingRows) -> Sampled:
        """One token a row. Greedy rows take the argmax, the lowest id where several tie; 16 bits are widened to float32."""
        if rows.adjustments is None and by_triton(logits):
            return Sampled(_by_kernel(logits, logits, rows))  # it reads 16 bits as they are
        raw = at_least_float32(logits)
        logits, failures = (raw, {}) if rows.adjustments is None else adjust(raw, rows.adjustments)
        if by_triton(raw):
            return Sampled(_by_kernel(logits, raw, rows), failures)
        all_random = len(rows.whole) + len(rows.ranked) == len(logits)
        token_ids = rows.position.clone() if all_random else argmax(logits)
        if rows.whole:
            chosen = select(rows.whole, logits)
            token_ids[chosen] = draw(tempered(logits[chosen], rows, chosen).softmax(-1), _uniform(rows)[chosen])
        if rows.ranked:
            chosen = select(rows.ranked, logits)
            token_ids[chosen] = self._draw_ranked(tempered(logits[chosen], rows, chosen), rows, chosen)
        if logits is not raw:
            token_ids = torch.where(usable(logits), token_ids, NOTHING_LEFT)
        return Sampled(torch.where(usable(raw), token_ids, BAD_LOGITS), failures)

    def _draw_ranked(self, logits: Float[Tensor, "R V"], rows: SamplingRows, chosen: Chosen) -> Int64[Tensor, "R"]:
        """Draw from what top-k and top-p leave."""
        u, token_ids = _uniform(rows)[chosen], rows.position[chosen].clone()
        weights, top_k, top_p = logits.softmax(-1), rows.top_k[chosen], rows.top_p[chosen]
        for kept in kept_by_head(logits, weights, top_k, top_p, rows.largest_top_k):
            place = draw(kept.weights, u[kept.rows])
            token_ids[kept.rows] = kept.ids.gather(-1, place.unsqueeze(-1)).squeeze(-1)
            self.num_rows_beyond_head += len(kept.rows) * (kept.ids.shape[-1] > HEAD)
            self.num_rows_sorted += len(kept.rows) * kept.was_sorted
        return token_ids


def _by_kernel(logits: Float[Tensor, "R V"], raw: Float[Tensor, "R V"], rows: SamplingRows) -> Int64[Tensor, "R"]:
    """The same law, failures included, in two or three launches that the host does not wait for."""
    from refimpl.kernels.sampling import sample

    filters = {"top_k": rows.top_k, "top_p": rows.top_p, "min_p": rows.min_p} if rows.ranked or rows.min_p_on else {}
    adjusted = None if logits is raw else raw
    token_ids, _ = sample(
        logits, rows.temperature, rows.seed, rows.path, rows.position, Purpose.TARGET, raw=adjusted, **filters
    )
    return token_ids


Chosen = Int64[Tensor, "chosen"] | slice
"""Some rows by number, or all of them."""


def select(rows: list[int], logits: Float[Tensor, "R V"]) -> Chosen:
    """What to index some rows of the logits by. All rows are not copied."""
    return slice(None) if len(rows) == len(logits) else to_device(torch.tensor(rows), logits.device)


def _uniform(rows: SamplingRows) -> Float64[Tensor, "R"]:
    return uniform(rows.seed, rows.path, rows.position, Purpose.TARGET)


def tempered(logits: Float[Tensor, "R V"], rows: SamplingRows, chosen: Chosen = slice(None)) -> Float[Tensor, "R V"]:
    """The logits of the ``chosen`` rows after temperature and min-p, in a new tensor. The largest of each row becomes 0.

    The maximum is subtracted before the division, so a tiny temperature sends the others to −inf and overflows nothing.
    """
    scaled = logits - logits.amax(-1, keepdim=True)
    scaled.div_(rows.temperature[chosen].to(logits.dtype).unsqueeze(-1))
    return min_p_filter(scaled, rows.min_p[chosen]) if rows.min_p_on else scaled


def usable(logits: Float[Tensor, "R V"]) -> Bool[Tensor, "R"]:
    """Rows whose largest logit is a finite number: NaN and +inf are larger than any, and all −inf leaves none."""
    return logits.amax(-1).isfinite()


def draw(weights: Float[Tensor, "R K"], u: Float64[Tensor, "R"]) -> Int64[Tensor, "R"]:
    """Inverse CDF: the place of the first weight with which the cumulative sum exceeds ``u`` times the whole sum."""
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    threshold = (u * cumulative[:, -1]).unsqueeze(-1)
    # A weight of 0 never is the first to exceed anything. The clamp is for rows of NaN, which are refused.
    return torch.searchsorted(cumulative, threshold, right=True).squeeze(-1).clamp(max=weights.shape[-1] - 1)
