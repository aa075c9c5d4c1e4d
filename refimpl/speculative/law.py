"""What speculation is worth, in closed form.

A round drafts K tokens at c target steps each, and checks them in one target step over K + 1 tokens, which costs v(K + 1)
plain steps: 1 while the step is bound by memory, more once it is bound by arithmetic. It brings 1 token and each accepted
draft up to the first rejection::

    acceptance        α = Σ min(p, q) = 1 − TV(p, q)
    tokens a round    E = 1 + α + α² + … + α^K = (1 − α^(K+1)) / (1 − α)
    speed-up              E / (K · c + v(K + 1))

where α is the same at each position, and 1 + α₁ + α₁α₂ + … where it is not. Source: Leviathan et al. 2023, theorem 3.8.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from operator import mul

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from refimpl.errors import ConfigError

LADDER = (0, 1, 2, 3, 5, 8)
"""The numbers of drafts among which the engine chooses."""


def acceptance(p: Float[Tensor, "... V"], q: Float[Tensor, "... V"]) -> Float64[Tensor, "..."]:
    """``α = Σ min(p, q)``: how probable it is that a draft from q is accepted. Rows count up to a factor."""
    p, q = (law.double() / law.sum(-1, keepdim=True, dtype=torch.float64) for law in (p, q))
    return torch.minimum(p, q).sum(-1)


def total_variation(p: Float[Tensor, "... V"], q: Float[Tensor, "... V"]) -> Float64[Tensor, "..."]:
    """``TV = ½ Σ |p − q|``, which is 1 − α. Rows count up to a factor."""
    p, q = (law.double() / law.sum(-1, keepdim=True, dtype=torch.float64) for law in (p, q))
    return (p - q).abs().sum(-1) / 2


def tokens_a_round(alpha: float | Sequence[float], K: int) -> float:
    """``E``, the tokens that a round of ``K`` drafts brings on average: 1 to K + 1.

    ``alpha`` is the probability that a draft is accepted if all before it were: one number, or one for each position.

    Raises:
        ConfigError: one is no probability, K is negative, or there are fewer positions than drafts.

    """
    rates = _rates(alpha, K)
    return math.fsum([1.0, *accumulate(rates, mul)])


def lengths_of_rounds(alpha: float | Sequence[float], K: int) -> list[float]:
    """The probabilities that a round brings 1, 2, … K + 1 tokens. Errors are those of :func:`tokens_a_round`."""
    more_than = [1.0, *accumulate(_rates(alpha, K), mul), 0.0]
    return [here - beyond for here, beyond in pairwise(more_than)]


def speedup(alpha: float | Sequence[float], K: int, c: float, v: Callable[[int], float] | float = 1.0) -> float:
    """How many times as fast as without speculation: ``E / (K · c + v(K + 1))``.

    Args:
        alpha: as in :func:`tokens_a_round`, whose errors are this function's too.
        K: drafts a round; 0 is no speculation, and its speed-up 1.
        c: the time of a draft over that of a plain target step.
        v: the time of a target step over K + 1 tokens of each sequence, over that of a plain one: a function of K + 1, or
            one number for all K above 0.

    """
    if K == 0:
        return 1.0
    if not c >= 0:
        raise ConfigError(f"c = {c} is a draft's time over a target step's; it must be 0 or more")
    return tokens_a_round(alpha, K) / (K * c + (v(K + 1) if callable(v) else v))


def best_num_drafts(
    alpha: float | Sequence[float], c: float, v: Callable[[int], float] | float = 1.0, ladder: Sequence[int] = LADDER
) -> int:
    """The ``K`` of the ladder whose speed-up is the largest; the least of several, so 0 where nothing pays.

    Rungs beyond the positions that ``alpha`` tells of are left out. Errors are those of :func:`speedup`.
    """
    reach = max(ladder) if isinstance(alpha, int | float) else len(alpha)
    return max((K for K in sorted(ladder) if reach >= K), key=lambda K: speedup(alpha, K, c, v))


def most_draft_cost(alpha: float | Sequence[float], K: int, goal: float, v: Callable[[int], float] | float = 1.0) -> float:
    """The largest c at which ``K`` drafts are ``goal`` times as fast; negative where none is.

    ``E / goal = K · c + v(K + 1)``, solved for c. K is 1 or more.
    """
    return (tokens_a_round(alpha, K) / goal - (v(K + 1) if callable(v) else v)) / K


def _rates(alpha: float | Sequence[float], K: int) -> list[float]:
    """The acceptance of each of ``K`` positions."""
    if K < 0:
        raise ConfigError(f"K = {K} is a number of drafts; it must be 0 or more")
    rates = [float(alpha)] * K if isinstance(alpha, int | float) else [float(rate) for rate in alpha[:K]]
    if len(rates) < K:
        raise ConfigError(f"acceptance is told for {len(rates)} positions; K = {K} drafts need as many")
    if wrong := [rate for rate in rates if not 0 <= rate <= 1]:
        raise ConfigError(f"acceptance {wrong[0]} is no probability; it must lie in [0, 1]")
    return rates
