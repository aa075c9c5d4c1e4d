"""The check of drafted tokens that leaves the target's law as it is, whatever the draft proposes.

At each position the target gives p, the draft gives q, and the drafted token x was drawn from q::

    draft    x₁ ~ q₁    x₂ ~ q₂    x₃ ~ q₃                one pass of the target gives p₁ p₂ p₃ p₄
    check    u₁ < p/q   u₂ < p/q   u₃ ≥ p/q
    verdict  x₁         x₂         y ~ (p₃ − q₃)⁺ / Σ     3 tokens: 2 accepted, and 1 drawn in place of the rejected one
                                                          had x₃ been accepted too: 4, the last one drawn from p₄

Why it is exact: a token x leaves as an accepted draft with probability q(x) · min(1, p(x)/q(x)) = min(p(x), q(x)), and as a
redrawn one with (1 − Σ min(p, q)) · (p(x) − q(x))⁺ / Σ(p − q)⁺ = (p(x) − q(x))⁺, as both sums are 1 − Σ min(p, q). Together
that is p(x). What is redrawn ends the round, since the drafts behind it were made for another token.

Sources: Leviathan, Kalman and Matias 2023, "Fast inference from transformers via speculative decoding"; Chen et al. 2023,
"Accelerating large language model decoding with speculative sampling".
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor

from refimpl.kernels.philox import Purpose, uniform
from refimpl.outputs import BAD_LOGITS, NO_TOKEN, NOTHING_LEFT
from refimpl.sampling.sampler import draw

SHORT = 64
"""Probabilities that are added up in their own dtype."""


@dataclass(frozen=True)
class Verdict:
    """What a round came to, for each sequence; ``K1`` is K + 1."""

    token_ids: Int64[Tensor, "S K1"]
    """The accepted drafts, then the one token drawn, then ``NO_TOKEN``. In place of the token drawn stands ``BAD_LOGITS``
    or ``NOTHING_LEFT`` where the target gave nothing to draw from; what was accepted before it holds."""
    num_accepted: Int64[Tensor, "S"]
    """Of the drafts; the round brings one token more."""


@dataclass(frozen=True)
class RoundUniforms:
    """The uniform numbers of a round."""

    accept: Float64[Tensor, "S K"]
    draw: Float64[Tensor, "S K1"]
    """By them the tokens are drawn that are no accepted drafts, at whichever position the round ends."""


def round_uniforms(seed: Int64[Tensor, "S"], path: Int64[Tensor, "S"], first: Int64[Tensor, "S"], K: int) -> RoundUniforms:
    """Those of ``K`` drafts, the first of which is the token at index ``first`` of its sequence.

    A position's token is drawn by the number that draws it without speculation, so K = 0 is no speculation, token by token.
    That numbers of rejected positions come again in the next round does no harm: no token before had a part of them.
    """
    index = torch.arange(2 * K + 1, device=first.device)  # the accepting ones, then those that draw: few, so at once
    purpose = torch.where(index < K, int(Purpose.ACCEPT), int(Purpose.TARGET))
    shape = (len(first), len(index))
    columns = (
        seed.unsqueeze(-1),
        path.unsqueeze(-1),
        first.unsqueeze(-1) + torch.where(index < K, index, index - K),
        purpose,
    )
    numbers = uniform(*(column.expand(shape).flatten() for column in columns)).view(shape)
    return RoundUniforms(accept=numbers[:, :K], draw=numbers[:, K:])


def verify(
    target_probs: Float[Tensor, "S K1 V"],
    draft_ids: Int64[Tensor, "S K"],
    draft_probs: Float[Tensor, "S K V"] | None,
    num_drafts: Int64[Tensor, "S"],
    accept_uniforms: Float64[Tensor, "S K"],
    draw_uniforms: Float64[Tensor, "S K1"],
) -> Verdict:
    """Accept each draft with probability min(1, p/q), up to the first that is not; then draw one token.

    After a rejection it is drawn from the positive part of p − q, after none from p at the position behind the drafts.

    Args:
        target_probs: p, at the positions of the drafts and at the one behind. Like q, up to a factor a row, as filters leave
            it. Greedy rows are one-hot. A row that is not finite is a failure, ``BAD_LOGITS``, and one of zeros another,
            ``NOTHING_LEFT``, where a token must be drawn from it; rows behind that are not looked at.
        draft_ids: the tokens drafted, each drawn from its row of q.
        draft_probs: q; None for drafts of no distribution (n-grams, greedy drafts), whose q is one-hot.
        num_drafts: how many are a sequence's own; the rest is padding, and may hold anything.
        accept_uniforms: numbers in [0, 1) by which drafts are accepted.
        draw_uniforms: numbers in [0, 1) by which a token is drawn, one for each position where the round may end.

    A draft that is no token of the vocabulary, or whose q is no distribution (NaN, infinite, all zero), counts as none: the
    round ends before it, and the token there is drawn from p, which is exact whatever was proposed. Where p(x) = q(x) = 0
    the draft is rejected. Where rounding leaves nothing of p − q, p and q are equal as far as can be told; the token is
    drawn from p then, and so never is one that p forbids.

    """
    K, V = draft_ids.shape[1], target_probs.shape[-1]
    drafts = _Drafts.of(draft_ids, draft_probs, num_drafts, V)
    p_total = _total(target_probs)
    p = target_probs[:, :K].gather(-1, drafts.ids.unsqueeze(-1)).squeeze(-1)
    # u < p/q without a division, each side with the other's total; NaN is not less than anything.
    accepted = drafts.exist & (accept_uniforms * drafts.q * p_total[:, :K] < p.double() * drafts.q_total)
    num_accepted = accepted.long().cumprod(-1).sum(-1)

    sequences = torch.arange(len(draft_ids), device=draft_ids.device)
    end = (sequences, num_accepted)  # of each sequence the row where its round ends
    weights, total = target_probs[end].double(), p_total[end]
    if K:
        weights = _after_rejection(weights, total, drafts, draft_probs, num_accepted)
    drawn = draw(weights, draw_uniforms[end])
    drawn = drawn.masked_fill(total == 0, NOTHING_LEFT).masked_fill(~total.isfinite(), BAD_LOGITS)
    return Verdict(_laid_out(draft_ids, num_accepted, drawn), num_accepted)


def verify_coupled(
    target_token_ids: Int64[Tensor, "S K1"], draft_ids: Int64[Tensor, "S K"], num_drafts: Int64[Tensor, "S"]
) -> Verdict:
    """Accept the drafts that are the tokens which the target itself draws, up to the first that is not.

    ``target_token_ids`` were drawn by each position's own uniform number, as without speculation, and so are the tokens of
    the verdict, at any K. Drafts drawn by the same numbers agree where a token's intervals in the two cumulative
    distributions overlap, which is less than the min(p, q) of :func:`verify`: a shift of mass among the first tokens of the
    vocabulary moves the intervals of all behind. ``BAD_LOGITS`` and ``NOTHING_LEFT`` agree with no draft.

    """
    index = torch.arange(draft_ids.shape[1], device=draft_ids.device)
    agrees = (index < num_drafts.unsqueeze(-1)) & (draft_ids == target_token_ids[:, :-1]) & (draft_ids >= 0)
    num_accepted = agrees.long().cumprod(-1).sum(-1)
    drawn = target_token_ids.gather(-1, num_accepted.unsqueeze(-1)).squeeze(-1)
    return Verdict(_laid_out(draft_ids, num_accepted, drawn), num_accepted)


@dataclass(frozen=True)
class _Drafts:
    """Drafted tokens with their probabilities."""

    ids: Int64[Tensor, "S K"]
    """0 where there is none."""
    exist: Bool[Tensor, "S K"]
    q: Float64[Tensor, "S K"]
    q_total: Float64[Tensor, "S K"]

    @classmethod
    def of(
        cls, ids: Int64[Tensor, "S K"], probs: Float[Tensor, "S K V"] | None, num_drafts: Int64[Tensor, "S"], V: int
    ) -> _Drafts:
        """Sort out what is none."""
        index = torch.arange(ids.shape[1], device=ids.device)
        exist = (index < num_drafts.unsqueeze(-1)) & (ids >= 0) & (ids < V)
        ids = ids.masked_fill(~exist, 0)
        if probs is None:
            one = torch.ones_like(ids, dtype=torch.float64)
            return cls(ids, exist, one, one)
        q_total = _total(probs)
        q = probs.gather(-1, ids.unsqueeze(-1)).squeeze(-1).double()
        return cls(ids, exist & q_total.isfinite() & (q_total > 0), q, q_total)


def _total(probs: Float[Tensor, "S K V"]) -> Float64[Tensor, "S K"]:
    """The sum of each row, in float64: of short sums in the law's own dtype, which is a third of the time of widening all.

    Equal rows have equal sums, however many there are and wherever they lie.
    """
    whole = probs.shape[-1] // SHORT * SHORT
    sums: Tensor = probs[..., :whole].unflatten(-1, (-1, SHORT)).sum(-1).sum(-1, dtype=torch.float64)
    return sums + probs[..., whole:].sum(-1, dtype=torch.float64)


def _after_rejection(
    weights: Float64[Tensor, "S V"],
    total: Float64[Tensor, "S"],
    drafts: _Drafts,
    draft_probs: Float[Tensor, "S K V"] | None,
    num_accepted: Int64[Tensor, "S"],
) -> Float64[Tensor, "S V"]:
    """The positive part of p − q in the rows whose round ends by a rejection; ``weights`` and ``total`` are p's."""
    K = drafts.ids.shape[1]
    index = num_accepted.clamp(max=K - 1).unsqueeze(-1)
    rejected = (num_accepted < K) & drafts.exist.gather(-1, index).squeeze(-1)
    if draft_probs is None:
        residual = weights.scatter(-1, drafts.ids.gather(-1, index), 0)
    else:
        q = draft_probs[torch.arange(len(weights), device=weights.device), index.squeeze(-1)]
        residual = weights / total.unsqueeze(-1) - q.double() / drafts.q_total.gather(-1, index)
        residual = residual.clamp(min=0)
    rejected = rejected & (residual.sum(-1) > 0)  # false for NaN
    return torch.where(rejected.unsqueeze(-1), residual, weights)


def _laid_out(
    draft_ids: Int64[Tensor, "S K"], num_accepted: Int64[Tensor, "S"], drawn: Int64[Tensor, "S"]
) -> Int64[Tensor, "S K1"]:
    """A verdict's tokens."""
    end = num_accepted.unsqueeze(-1)
    index = torch.arange(draft_ids.shape[1] + 1, device=draft_ids.device)
    token_ids = torch.nn.functional.pad(draft_ids, (0, 1)).masked_fill(index > end, NO_TOKEN)
    return token_ids.scatter(-1, end, drawn.unsqueeze(-1))
