"""The filters that narrow a distribution before a token is drawn. Each keeps at least the most probable token of a row.

All take logits that are finite or −inf and return logits with the dropped tokens at −inf. They mutate nothing.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor


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

    ``top_k`` under 1 or over V keeps all. Where probabilities tie, the lower id counts as the more probable.
    Source of top-p: Holtzman et al. 2019, "The Curious Case of Neural Text Degeneration".
    """
    V = logits.shape[-1]
    ranked, order = logits.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(V, device=logits.device)
    limit = torch.where(top_k < 1, V, top_k).unsqueeze(-1)
    ranked = ranked.masked_fill(rank >= limit, -math.inf)
    mass_before = ranked.softmax(-1).cumsum(-1).roll(1, dims=-1)
    mass_before[:, 0] = 0
    p = top_p.to(logits.dtype).unsqueeze(-1)
    dropped = (mass_before >= p) & (p < 1) & (rank > 0)
    ranked = ranked.masked_fill(dropped, -math.inf)
    return torch.full_like(logits, -math.inf).scatter(-1, order, ranked)
