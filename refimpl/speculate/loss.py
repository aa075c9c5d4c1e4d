"""What training makes small: how far the draft's distributions are from the target's, over several drafted tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from refimpl.speculate.dense import Batch
from refimpl.speculate.drafters import Drafter
from refimpl.speculate.self_text import Texts

DECAY = 0.7
"""The weight of a drafted token beside the one before it: it is tried only if that one was accepted."""
ROWS_AT_ONCE = 2048
"""Rows of whole distributions in work at once."""


def draft_loss(drafter: Drafter, batch: Batch, temperature: float) -> tuple[Float[Tensor, ""], Float[Tensor, "K"]]:
    """The loss of a batch, and the mean acceptance of each drafted token in it.

    For each drafted token the divergence of the draft from the target, KL(p ‖ q), and their distance in total variation,
    1 − Σ min(p, q), which is the share of drafts that will be rejected; both at the temperature of use.
    """
    losses, overlaps = [], []
    # The target's law behind each token of an answer, once for all drafted tokens: rows of it by place in the batch.
    judged = batch.ahead(batch.drafts(1), -1)
    judged[:, 0] = False
    law_of = judged.flatten().cumsum(0).view(judged.shape) - 1
    with torch.no_grad():
        log_p = drafter.target_logits(batch.hidden[judged]).div_(temperature).log_softmax(-1)
    for i, state in enumerate(drafter.states(batch, drafter.steps), start=1):
        rows = batch.drafts(i)
        logits = drafter.logits(state[rows])
        with torch.autocast(logits.device.type, enabled=False):  # sums over a vocabulary need their digits
            distance = _Distance.apply(logits, log_p, batch.ahead(law_of, i)[rows], temperature)  # type: ignore[no-untyped-call]
            loss, overlap = distance
        losses.append(DECAY ** (i - 1) * loss)
        overlaps.append(overlap)
    return torch.stack(losses).sum(), torch.stack(overlaps)


class _Distance(torch.autograd.Function):
    """The mean over rows of KL(p ‖ q) + 1 − Σ min(p, q), q = softmax(z / T), and its gradient by z in the same passes.

    A row of it holds thousands of numbers, and autograd would keep a dozen such tensors and pass over them twice as often::

        ∂ KL / ∂z = (q − p) / T        ∂ Σ min(p, q) / ∂z = q ∘ (m − Σ q m) / T,   m = 1 where q < p
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Float[Tensor, "R V"],
        log_p: Float[Tensor, "laws V"],
        law_of: Int[Tensor, "R"],
        temperature: float,
    ) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
        gradient = torch.empty_like(logits)
        divergence, overlap = logits.new_zeros(()), logits.new_zeros(())
        for start in range(0, len(logits), ROWS_AT_ONCE):
            chunk = slice(start, start + ROWS_AT_ONCE)
            log_q = (logits[chunk] / temperature).log_softmax(-1)
            log_p_here = log_p[law_of[chunk]].to(log_q.dtype)
            p, q = log_p_here.exp(), log_q.exp()
            divergence += torch.linalg.vecdot(p, log_p_here.sub_(log_q)).sum()
            above = (q >= p).to(q.dtype)
            below = 1 - torch.linalg.vecdot(q, above)  # Σ q m
            overlap += (below + torch.linalg.vecdot(p, above)).sum()
            torch.mul(above.add_(below.unsqueeze(-1)), q, out=gradient[chunk]).sub_(p)
        count = max(1, len(logits))
        ctx.save_for_backward(gradient.div_(temperature * count))
        ctx.mark_non_differentiable(overlap)
        return divergence / count + 1 - overlap / count, overlap.div_(count)

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, _: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * grad_loss, None, None, None


def learning_rate(step: int, steps: int, peak: float, spent: float = 0.0) -> float:
    """A short linear rise, then half a cosine down to a fiftieth of the peak; sooner if ``spent`` of the time is gone."""
    rise = max(1, min(100, steps // 10))
    if step < rise:
        return peak * (step + 1) / rise
    turn = min(1.0, max((step - rise) / max(1, steps - rise), spent))
    return peak * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * turn)))


BATCHES_SORTED = 32


def batches_of(texts: Texts, batch_tokens: int, seed: int) -> Iterator[list[int]]:
    """Which texts make each batch: endlessly, in an order that is a function of the seed.

    Texts of similar length go together, so that a batch of ``batch_tokens`` tokens, padding counted, has little padding.
    """
    generator = np.random.default_rng(seed)
    lengths = texts.lengths
    chosen = np.flatnonzero(lengths > texts.answers)
    while True:
        order = generator.permutation(chosen)
        pool = max(1, int(BATCHES_SORTED * batch_tokens / lengths[chosen].mean()))
        for start in range(0, len(order), pool):
            members = order[start : start + pool]
            cut = list(in_batches(members[np.argsort(lengths[members], kind="stable")], lengths, batch_tokens))
            for i in generator.permutation(len(cut)):
                yield cut[i]


def in_batches(sorted_texts: np.ndarray, lengths: np.ndarray, batch_tokens: int) -> Iterator[list[int]]:
    """Texts that are sorted by length, in batches of at most ``batch_tokens`` tokens with padding, of one text at least."""
    batch: list[int] = []
    for text in sorted_texts.tolist():
        if batch and (len(batch) + 1) * lengths[text] > batch_tokens:
            yield batch
            batch = []
        batch.append(text)
    if batch:
        yield batch
