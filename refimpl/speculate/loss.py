"""What training makes small: how far the draft's distributions are from the target's, over several drafted tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from refimpl.speculate.dense import Batch
from refimpl.speculate.drafters import Drafter
from refimpl.speculate.self_text import Texts

DECAY = 0.7
"""The weight of a drafted token beside the one before it: it is tried only if that one was accepted."""


def draft_loss(drafter: Drafter, batch: Batch, temperature: float) -> tuple[Float[Tensor, ""], Float[Tensor, "K"]]:
    """The loss of a batch, and the mean acceptance of each drafted token in it.

    For each drafted token the divergence of the draft from the target, KL(p ‖ q), and their distance in total variation,
    1 − Σ min(p, q), which is the share of drafts that will be rejected; both at the temperature of use.
    """
    losses, overlaps = [], []
    for i, state in enumerate(drafter.states(batch, drafter.steps), start=1):
        rows = batch.drafts(i)
        with torch.no_grad():
            log_p = (drafter.target_logits(batch.ahead(batch.hidden, i)[rows]) / temperature).log_softmax(-1)
            p = log_p.exp()
        log_q = (drafter.logits(state[rows]) / temperature).log_softmax(-1)
        divergence = (p * (log_p - log_q)).sum(-1).mean()
        overlap = torch.minimum(p, log_q.exp()).sum(-1).mean()
        losses.append(DECAY ** (i - 1) * (divergence + 1 - overlap))
        overlaps.append(overlap.detach())
    return torch.stack(losses).sum(), torch.stack(overlaps)


def learning_rate(step: int, steps: int, peak: float) -> float:
    """A short linear rise, then half a cosine down to a fiftieth of the peak."""
    rise = max(1, min(100, steps // 10))
    if step < rise:
        return peak * (step + 1) / rise
    turn = (step - rise) / max(1, steps - rise)
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
