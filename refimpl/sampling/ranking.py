"""The most probable tokens of a row, in order, without sorting the whole vocabulary.

Of equal values the lower id comes first, everywhere: what is drawn must not depend on how a device breaks ties.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor


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
    ids = x.topk(count, dim=-1, sorted=False).indices.sort(dim=-1).values
    values, order = x.gather(-1, ids).sort(dim=-1, descending=True, stable=True)
    settled = (values > values[:, -1:]).sum(-1)
    return Ranked(values, ids.gather(-1, order), settled)


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
