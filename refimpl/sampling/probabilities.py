"""What the sampler draws from, as probabilities: for those who compare two laws before they draw.

::

    raw logits ── adjustments ──┬─ greedy ── one-hot at the argmax ─────────────────► probabilities
                                └─ / temperature ─ min_p ─ softmax ─ top_k, top_p ──►

One row of them, the row's uniform number and :func:`refimpl.sampling.sampler.draw` give the sampler's token, bit for bit.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from refimpl.kernels.reference import at_least_float32
from refimpl.sampling.adjustments import adjust
from refimpl.sampling.filters import kept_by_head
from refimpl.sampling.ranking import argmax
from refimpl.sampling.sampler import Chosen, SamplingRows, select, tempered, usable


def probabilities(logits: Float[Tensor, "R V"], rows: SamplingRows) -> tuple[Float[Tensor, "R V"], dict[int, str]]:
    """Of each token of the vocabulary, at least in float32; and the failures of logits hooks, by row.

    Where filters dropped tokens the rest is not scaled up: a row's sum may be under 1. A row is NaN where the sampler would
    say ``BAD_LOGITS``, and zero where it would say ``NOTHING_LEFT``.
    """
    raw = at_least_float32(logits)
    logits, failures = (raw, {}) if rows.adjustments is None else adjust(raw, rows.adjustments)
    all_random = len(rows.whole) + len(rows.ranked) == len(logits)
    probs = torch.empty_like(logits) if all_random else _one_hot(argmax(logits), logits)
    if rows.whole:
        chosen = select(rows.whole, logits)
        probs[chosen] = tempered(logits[chosen], rows, chosen).softmax(-1)
    if rows.ranked:
        chosen = select(rows.ranked, logits)
        probs[chosen] = _filtered(tempered(logits[chosen], rows, chosen), rows, chosen)
    if logits is not raw:
        probs.masked_fill_(~usable(logits).unsqueeze(-1), 0)
    return probs.masked_fill_(~usable(raw).unsqueeze(-1), math.nan), failures


def _one_hot(ids: Int64[Tensor, "R"], like: Float[Tensor, "R V"]) -> Float[Tensor, "R V"]:
    return torch.zeros_like(like).scatter_(-1, ids.unsqueeze(-1), 1)


def _filtered(logits: Float[Tensor, "R V"], rows: SamplingRows, chosen: Chosen) -> Float[Tensor, "R V"]:
    """What top-k and top-p leave of the softmax."""
    weights, left = logits.softmax(-1), torch.zeros_like(logits)
    for kept in kept_by_head(logits, weights, rows.top_k[chosen], rows.top_p[chosen], rows.largest_top_k):
        left[kept.rows] = left[kept.rows].scatter(-1, kept.ids, kept.weights)
    return left
