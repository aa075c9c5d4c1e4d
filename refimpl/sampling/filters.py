"""The filters that narrow a distribution before a token is drawn. Each keeps at least the most probable token of a row.

All take logits that are finite or −inf and return logits with the dropped tokens at −inf. They mutate nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

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
    definition, by a full sort; :func:`kept_by_head` gives the same with less work.
    Source of top-p: Holtzman et al. 2019, "The Curious Case of Neural Text Degeneration".
    """
    ranked, weights = rank_all(logits), logits.softmax(-1)
    num_kept = _num_kept(ranked, weights, weights.sum(-1, dtype=torch.float64), top_k, top_p)
    dropped = _ranks(ranked) >= num_kept.unsqueeze(-1)
    return torch.full_like(logits, -math.inf).scatter(-1, ranked.ids, ranked.values.masked_fill(dropped, -math.inf))


@dataclass(frozen=True)
class Kept:
    """What top-k and top-p leave of some rows: it is among ``K`` candidates, in the order of the vocabulary."""

    rows: Int64[Tensor, "R2"]
    ids: Int64[Tensor, "R2 K"]
    weights: Float[Tensor, "R2 K"]
    """0 where a candidate is dropped."""
    was_sorted: bool
    """Whether the whole vocabulary was ranked, so that all of it are candidates."""


def kept_by_head(
    logits: Float[Tensor, "R V"],
    weights: Float[Tensor, "R V"],
    top_k: Int[Tensor, "R"],
    top_p: Float[Tensor, "R"],
    largest_k: int,
    length: int = HEAD,
) -> Iterator[Kept]:
    """What :func:`top_k_top_p_filter` leaves, exactly, of each row, with its ``weights``, the logits' softmax.

    Some rows at a time: those for which a head was long enough.

    The head of each ranking, ``length`` tokens or the largest k asked for (``largest_k``) if that is more, tells almost
    always where to cut. Where the head's mass does not reach ``top_p``, or the cut falls among tokens that tie with the
    head's last, a row is looked at again with a head ``GROWTH`` times as long, and at last sorted whole. All ways use the
    same sums: the total mass in the order of the vocabulary, the mass of a head in the order of its ranks, each in float64.
    """
    rows, V = torch.arange(len(logits), device=logits.device), logits.shape[-1]
    total, length = weights.sum(-1, dtype=torch.float64), max(length, with_margin(largest_k))
    while len(rows):
        head = rank_head(logits, length)
        num_kept = _num_kept(head, weights, total, top_k, top_p)
        stays, done = _ranks(head) < num_kept.unsqueeze(-1), num_kept <= head.settled
        ids, order = head.ids.sort(-1)
        kept = weights.gather(-1, ids) * stays.gather(-1, order)
        if done.all():
            yield Kept(rows, ids, kept, was_sorted=False)
            return
        yield Kept(rows[done], ids[done], kept[done], was_sorted=False)
        left = ~done
        rows, logits, weights, total = rows[left], logits[left], weights[left], total[left]
        top_k, top_p = top_k[left], top_p[left]
        length *= GROWTH
        if length >= V // 2:
            break
    everything = torch.arange(V, device=logits.device)
    for some in torch.arange(len(rows), device=logits.device).split(SORTED_AT_ONCE):
        stays = top_k_top_p_filter(logits[some], top_k[some], top_p[some]) > -math.inf
        yield Kept(rows[some], everything.expand(stays.shape), weights[some] * stays, was_sorted=True)


def _num_kept(
    ranked: Ranked,
    weights: Float[Tensor, "R V"],
    total: Float64[Tensor, "R"],
    top_k: Int[Tensor, "R"],
    top_p: Float[Tensor, "R"],
) -> Int64[Tensor, "R"]:
    """How many of the first ranks stay, if that can be told from them; else a number beyond ``ranked.settled``."""
    V, K = weights.shape[-1], ranked.ids.shape[-1]
    mass: Float64[Tensor, "R K"] = weights.gather(-1, ranked.ids).cumsum(-1, dtype=torch.float64)
    limit = torch.where((top_k < 1) | (top_k > V), V, top_k)
    within = mass.gather(-1, (limit.clamp(max=K) - 1).unsqueeze(-1)).squeeze(-1)
    all_of_it = torch.where(limit < V, within, total)
    # Rank r stays if the mass before it is under p; so do all ranks up to the first whose own sum reaches p.
    short_of_p = (mass < (top_p.double() * all_of_it).unsqueeze(-1)).sum(-1)
    by_mass = torch.where(top_p < 1, short_of_p + 1, limit)
    return torch.minimum(by_mass, limit)


def _ranks(ranked: Ranked) -> Int64[Tensor, "K"]:
    return torch.arange(ranked.ids.shape[-1], device=ranked.ids.device)
