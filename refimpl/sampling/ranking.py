"""The most probable tokens of a row, in order, without sorting the whole vocabulary.

Of equal values the lower id comes first, everywhere: what is drawn must not depend on how a device breaks ties.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor

GROUP = 16
"""Tokens of a group, of which only the maximum is looked at unless it is among the largest."""
BLOCK = 64
"""Neighbouring tokens whose maximum is looked at before they are."""


@dataclass(frozen=True)
class Ranked:
    """The head of a ranking of each row, ``K`` tokens long."""

    values: Float[Tensor, "R K"]
    ids: Int64[Tensor, "R K"]
    settled: Int64[Tensor, "R"]
    """How many of them are certain. The others tie with the last, and so perhaps with tokens outside the head."""


def rank_head(x: Float[Tensor, "R V"], count: int) -> Ranked:
    """The first ``count`` tokens of a ranking, by ``topk``: a fraction of the work of sorting all.

    ``topk`` gives equal values in any order, and takes any of those that tie at its end. The first is put right by a sort
    of the head alone; the second is told by ``settled``.
    """
    V = x.shape[-1]
    if count >= V // 2:
        return rank_all(x)
    ids = _largest(x, count).sort(dim=-1).values
    values, order = x.gather(-1, ids).sort(dim=-1, descending=True, stable=True)
    settled = (values > values[:, -1:]).sum(-1)
    return Ranked(values, ids.gather(-1, order), settled)


def _largest(x: Float[Tensor, "R V"], count: int) -> Int64[Tensor, "R K"]:
    """The ids of the ``count`` largest, in any order; of those that tie with the last of them, any.

    The vocabulary is dealt out to groups (id modulo their number), and all that is looked for lies in the ``count`` groups
    with the largest maxima: a group left out has ``count`` maxima before it that are no smaller than anything in it.
    """
    V = x.shape[-1]
    groups = V // GROUP
    if 4 * count > groups:
        return x.topk(count, dim=-1, sorted=False).indices
    maxima = x[:, : groups * GROUP].unflatten(-1, (GROUP, groups)).amax(1)
    best = maxima.topk(count, dim=-1, sorted=False).indices
    members = best.unsqueeze(1) + torch.arange(0, groups * GROUP, groups, device=x.device).unsqueeze(-1)
    rest = torch.arange(groups * GROUP, V, device=x.device).expand(len(x), -1)
    ids = torch.cat((members.flatten(1), rest), dim=-1)
    return ids.gather(-1, x.gather(-1, ids).topk(count, dim=-1, sorted=False).indices)


def argmax(x: Float[Tensor, "R V"]) -> Int64[Tensor, "R"]:
    """The lowest id of each row's largest value. A CPU finds a maximum many times as fast as its place.

    So the place is looked for in the first block that holds the maximum. Rows with NaN give any id.
    """
    V = x.shape[-1]
    whole = F.pad(x, (0, -V % BLOCK), value=-math.inf) if V % BLOCK else x
    blocks = whole.unflatten(-1, (-1, BLOCK))
    first = blocks.amax(-1).argmax(-1)
    within = blocks[torch.arange(len(x), device=x.device), first].argmax(-1)
    place: Tensor = first * BLOCK + within
    return place.clamp(max=V - 1)


def rank_all(x: Float[Tensor, "R V"]) -> Ranked:
    """The whole ranking, by a stable sort."""
    R, V = x.shape
    values, ids = x.sort(dim=-1, descending=True, stable=True)
    return Ranked(values, ids, torch.full((R,), V, device=x.device))


def top(x: Float[Tensor, "R V"], count: int) -> tuple[Float[Tensor, "R K"], Int64[Tensor, "R K"]]:
    """The values and ids of the ``count`` largest of each row, exactly; at least 1, and at most V of them."""
    head = rank_head(x, with_margin(count))
    values, ids = head.values[:, :count], head.ids[:, :count]
    unsettled = (head.settled < count).nonzero().flatten()
    if len(unsettled):
        whole = rank_all(x[unsettled])
        values = values.index_copy(0, unsettled, whole.values[:, :count])
        ids = ids.index_copy(0, unsettled, whole.ids[:, :count])
    return values, ids


def with_margin(count: int) -> int:
    """A head long enough that a tie at rank ``count`` seldom runs past its end (logits of 16 bits tie often)."""
    return count + max(16, count // 4)
