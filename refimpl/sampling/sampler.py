"""The sampler: one token a row of logits, by one uniform number and the inverse of the cumulative distribution.

::

    logits ─ / temperature ─ min_p ─ top_k, top_p ─ softmax ─► probabilities ─ cumulative sum ─► first token past u · total

The uniform number ``u`` is a function of (seed, path, position): see :mod:`refimpl.kernels.philox`. So the token drawn does
not depend on the batch, on the order of requests, or on what was recomputed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from refimpl.kernels.philox import Purpose, uniform
from refimpl.kernels.reference import at_least_float32
from refimpl.outputs import BAD_LOGITS
from refimpl.sampling.filters import min_p_filter, top_k_top_p_filter


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

    def select(self, rows: Int64[Tensor, "R2"]) -> SamplingRows:
        """Some of the rows."""
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
        )


def sample(logits: Float[Tensor, "R V"], rows: SamplingRows) -> Int64[Tensor, "R"]:
    """The token drawn in each row; ``BAD_LOGITS`` where a row holds NaN or +inf, or no finite number at all.

    Greedy rows take the argmax, the lowest id where several tie. 16-bit logits are computed with in float32.
    """
    logits = at_least_float32(logits)
    token_ids = logits.argmax(-1)
    if rows.random:
        random = torch.tensor(rows.random, device=logits.device)
        chosen = rows.select(random)
        token_ids[random] = draw(probabilities(logits[random], chosen), chosen)
    return torch.where(usable(logits), token_ids, BAD_LOGITS)


def usable(logits: Float[Tensor, "R V"]) -> Bool[Tensor, "R"]:
    """Rows whose largest logit is a finite number: NaN and +inf are larger than any, and all −inf leaves none."""
    return logits.amax(-1).isfinite()


def probabilities(logits: Float[Tensor, "R V"], rows: SamplingRows) -> Float[Tensor, "R V"]:
    """The distribution that tokens are drawn from, after temperature and filters.

    The maximum is subtracted before the division, so a tiny temperature sends the others to −inf and overflows nothing.
    """
    scaled = (logits - logits.amax(-1, keepdim=True)) / rows.temperature.to(logits.dtype).unsqueeze(-1)
    if rows.filtered:
        scaled = min_p_filter(scaled, rows.min_p)
        scaled = top_k_top_p_filter(scaled, rows.top_k, rows.top_p)
    return scaled.softmax(-1)


def draw(probabilities: Float[Tensor, "R V"], rows: SamplingRows) -> Int64[Tensor, "R"]:
    """Inverse CDF in vocabulary order: the first token whose cumulative probability exceeds ``u`` times the total."""
    u = uniform(rows.seed, rows.path, rows.position, Purpose.TARGET)
    cumulative = probabilities.cumsum(-1, dtype=torch.float64)
    threshold = (u * cumulative[:, -1]).unsqueeze(-1)
    # A token of probability 0 never is the first to exceed anything. The clamp is for rows of NaN, which are refused.
    return torch.searchsorted(cumulative, threshold, right=True).squeeze(-1).clamp(max=probabilities.shape[-1] - 1)
