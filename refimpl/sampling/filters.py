"""The filters that narrow a distribution before a token is drawn. Each keeps at least the most probable token of a row.

All take logits that are finite or −inf and return logits with the dropped tokens at −inf. They mutate nothing.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Float64, Int, Int64
from torch import Tensor

from refimpl.sampling.ranking import Ranked, rank_all, rank_head, with_margin

HEAD = 256
"""Tokens that are ranked at first. Language models put nearly all mass on fewer, and finding them takes a pass or two over
the vocabulary, where sorting all of it takes tens."""

GROWTH = 8
"""A head that did not do is followed by one so many times as long: still a fraction of the work of sorting all."""
SORTED_AT_ONCE = 32
"""Rows whose whole vocabulary is sorted at a time: a sort takes some ten times the memory of the logits."""


def min_p_filter(logits: Float[Tensor, "R V"], min_p: Float[Tensor, "R"]) -> Float[Tensor, "R V"]:
    """Drop tokens less probable than ``min_p`` times the most probable one (0 drops none).

    Source: Nguyen et al. 2024, "Turning Up the Heat: Min-p Sampling".
    """
    threshold = logits.amax(-1, keepdim=True) + min_p.to(logits.dtype).log().unsqueeze(-1)
    return logits.masked_fill(logits < threshold, -math.inf)


def top_k_top_p_filter(
    logits: Float[Tensor, "R V"], top_k: Int[Tensor, "R"], top_p: Float[Tensor, "R"]
) -> Float[Tensor, "R V"]:
    """Keep the ``top_k`` most probable tokens, and of these the fewest whose share of their mass reaches ``top_p``.

    ``top_k`` under 1 or over V keeps all. Where probabilities tie, the lower id counts as the more probable. This is the
    definition, by a full sort; :func:`top_k_top_p_by_head` gives the same with less work.
    Source of top-p: Holtzman et al. 2019, "The Curious Case of Neural Text Degeneration".
    """
    ranked = rank_all(logits)
    return _keep(logits, ranked, _num_kept(ranked, _weights(logits), top_k, top_p))


def top_k_top_p_by_head(
    logits: Float[Tensor, "R V"],
    top_k: Int[Tensor, "R"],
    top_p: Float[Tensor, "R"],
    largest_k: int,
    length: int = HEAD,
) -> tuple[Float[Tensor, "R V"], int]:
    """What :func:`top_k_top_p_filter` gives, exactly, and how many rows had to be sorted whole.

    The head of each ranking, ``length`` tokens or the largest k asked for (``largest_k``) if that is more, tells almost
    always where to cut. Where the head's mass does not reach ``top_p``, or the cut falls among tokens that tie with the
    head's last, a row is looked at again with a head ``GROWTH`` times as long, and at last sorted whole. All ways use the
    same sums: the total mass in the order of the vocabulary, the mass of a head in the order of its ranks, each in float64.
    """
    V = logits.shape[-1]
    weights = _weights(logits)
    length = max(length, with_margin(largest_k))
    head = rank_head(logits, length)
    num_kept = _num_kept(head, weights, top_k, top_p)
    all_stay = ((top_k < 1) | (top_k >= V)) & (top_p >= 1)
    unsettled = ((num_kept > head.settled) & ~all_stay).nonzero().flatten()
    filtered = torch.where(all_stay.unsqueeze(-1), logits, _keep(logits, head, num_kept))
    if not len(unsettled):
        return filtered, 0
    if (longer := GROWTH * length) < V // 2:
        again, num_sorted = top_k_top_p_by_head(logits[unsettled], top_k[unsettled], top_p[unsettled], largest_k, longer)
        return filtered.index_copy_(0, unsettled, again), num_sorted
    for rows in unsettled.split(SORTED_AT_ONCE):
        filtered.index_copy_(0, rows, top_k_top_p_filter(logits[rows], top_k[rows], top_p[rows]))
    return filtered, len(unsettled)


def _weights(logits: Float[Tensor, "R V"]) -> Float[Tensor, "R V"]:
    """Masses up to a factor; the most probable token's is 1."""
    return (logits - logits.amax(-1, keepdim=True)).exp()


def _num_kept(
    ranked: Ranked, weights: Float[Tensor, "R V"], top_k: Int[Tensor, "R"], top_p: Float[Tensor, "R"]
) -> Int64[Tensor, "R"]:
    """How many of the first ranks stay, if that can be told from them; else a number beyond ``ranked.settled``."""
    V, K = weights.shape[-1], ranked.ids.shape[-1]
    mass: Float64[Tensor, "R K"] = weights.gather(-1, ranked.ids).cumsum(-1, dtype=torch.float64)
    limit = torch.where((top_k < 1) | (top_k > V), V, top_k)
    within = mass.gather(-1, (limit.clamp(max=K) - 1).unsqueeze(-1)).squeeze(-1)
    total = torch.where(limit < V, within, weights.sum(-1, dtype=torch.float64))
    # Rank r stays if the mass before it is under p; so do all ranks up to the first whose own sum reaches p.
    short_of_p = (mass < (top_p.double() * total).unsqueeze(-1)).sum(-1)
    by_mass = torch.where(top_p < 1, short_of_p + 1, limit)
    return torch.minimum(by_mass, limit)


def _keep(logits: Float[Tensor, "R V"], ranked: Ranked, num_kept: Int64[Tensor, "R"]) -> Float[Tensor, "R V"]:
    """The first ranks of each row at their values, all else at minus infinity."""
    rank = torch.arange(ranked.ids.shape[-1], device=logits.device)
    kept = ranked.values.masked_fill(rank >= num_kept.unsqueeze(-1), -math.inf)
    return torch.full_like(logits, -math.inf).scatter(-1, ranked.ids, kept)
