"""How many drafted tokens a target accepts, worked out on held-out text: exact expectations, and no drawing.

At temperature T the i-th drafted token is accepted with probability ``Σ min(p, q)`` (Leviathan et al. 2023), given that
those before it were. A text drawn from the target stands for such a run, weighted by the probability that the draft got
there: ``Π min(1, q / p)`` over the tokens before, which is the share of draws of each token that come by an accepted draft.
Greedily, a draft is accepted where both have the same most probable token.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import torch
from jaxtyping import Float, Int
from torch import Tensor

from refimpl.models.llama import LlamaForCausalLM
from refimpl.speculate.dense import Batch, mixed_precision
from refimpl.speculate.drafters import Drafter

ROWS_AT_ONCE = 1024
"""Rows of whole distributions in memory at once."""


class Acceptance(msgspec.Struct, frozen=True, kw_only=True):
    """Acceptance of the first, second, … drafted token, given those before it."""

    temperature: float
    prompts: str = "own"
    """Of which kind they were: the target's own, question or code."""
    by_position: list[float]
    outside_loops: list[float]
    """The same over tokens that stand in no loop."""
    share_of_loops: float
    """Of the tokens, those that stand in one."""
    tokens: int
    """That were looked at."""

    def tokens_a_round(self, k: int, outside_loops: bool = False) -> float:
        """Tokens that a check of ``k`` drafted tokens brings, the target's own one counted."""
        alphas = self.outside_loops if outside_loops else self.by_position
        reached, expected = 1.0, 1.0
        for alpha in alphas[:k]:
            reached *= alpha
            expected += reached
        return expected


@torch.no_grad()
def measure_acceptance(
    target: LlamaForCausalLM,
    drafter: Drafter,
    batches: Iterable[Batch],
    temperature: float,
    positions: int,
    prompts: str = "own",
) -> Acceptance:
    """Acceptance over the answers of texts that the target drew at this temperature."""
    device = target.embed_tokens.device
    # [inside or outside a loop, position]: accepted mass, and the mass that it is a share of.
    accepted = torch.zeros(2, positions, dtype=torch.float64, device=device)
    reached = torch.zeros(2, positions, dtype=torch.float64, device=device)
    tokens = loops = 0
    for batch in batches:
        weights = torch.ones(batch.token_ids.shape, dtype=torch.float64, device=device)
        with mixed_precision(target):
            states = list(drafter.states(batch, positions))
        for i, state in enumerate(states, start=1):
            rows = batch.drafts(i)
            hidden = batch.ahead(batch.hidden, i)
            overlap, ratio = _compared(target, drafter, hidden[rows], state[rows], batch.after(i + 1)[rows], temperature)
            in_loop = batch.ahead(batch.loops, i + 1)[rows].long()
            weight = weights[rows]
            reached[:, i - 1].index_add_(0, in_loop, weight)
            accepted[:, i - 1].index_add_(0, in_loop, weight * overlap)
            weights[rows] = weight * ratio
            if i == 1:
                tokens, loops = tokens + len(in_loop), loops + int(in_loop.sum())
    return Acceptance(
        temperature=temperature,
        prompts=prompts,
        by_position=(accepted.sum(0) / reached.sum(0).clamp(min=1e-12)).tolist(),
        outside_loops=(accepted[0] / reached[0].clamp(min=1e-12)).tolist(),
        share_of_loops=loops / max(1, tokens),
        tokens=tokens,
    )


def _compared(
    target: LlamaForCausalLM,
    drafter: Drafter,
    hidden: Float[Tensor, "R H"],
    state: Float[Tensor, "R Hd"],
    next_tokens: Int[Tensor, "R"],
    temperature: float,
) -> tuple[Float[Tensor, "R"], Float[Tensor, "R"]]:
    """For each row: the probability that a draft is accepted, and that the text's own token came by an accepted draft."""
    overlaps, ratios = [], []
    pieces = (x.split(ROWS_AT_ONCE) for x in (hidden, state, next_tokens))
    for h, s, token_ids in zip(*pieces, strict=True):
        with mixed_precision(target):
            p_logits = target.compute_logits(h)
            q_logits = _by_token_id(drafter, s, p_logits)
        if temperature == 0:
            same = (p_logits.argmax(-1) == q_logits.argmax(-1)).double()
            overlaps.append(same)
            ratios.append(same)
            continue
        p, q = ((logits / temperature).softmax(-1) for logits in (p_logits, q_logits))
        overlaps.append(torch.minimum(p, q).sum(-1).double())
        drawn = token_ids[:, None]
        ratios.append((q.gather(1, drawn) / p.gather(1, drawn).clamp(min=1e-30)).clamp(max=1).squeeze(1).double())
    empty = torch.zeros(0, dtype=torch.float64, device=hidden.device)
    return torch.cat([empty, *overlaps]), torch.cat([empty, *ratios])


def _by_token_id(drafter: Drafter, state: Tensor, like: Float[Tensor, "R V"]) -> Float[Tensor, "R V"]:
    logits = drafter.logits(state)
    if drafter.vocabulary is None or logits.shape == like.shape:
        return logits
    return torch.full_like(like, -torch.inf).index_copy_(1, drafter.vocabulary, logits.to(like.dtype))
