"""Laws of tiny worlds by the sampler's own parameters, and the check of drafts in the form that worlds are played with."""

from functools import cache

import numpy as np
import torch

from refimpl.exercises.rounds import Laws, make_logits, num_texts, tokens_of
from refimpl.outputs import Admission
from refimpl.sampling.probabilities import probabilities
from refimpl.sampling.slots import SamplingSlots
from refimpl.sampling_numbers import SamplingNumbers
from refimpl.speculative.rejection_sampler import verify

V, L = 4, 4


def text_rows(texts, vocab_size, **sampling):
    """Sampling rows of texts (lists of output tokens after a prompt of one), all with the same parameters."""
    numbers, tokens = SamplingNumbers(**sampling), [(0, *text) for text in texts]
    slots = SamplingSlots(len(texts), vocab_size, torch.device("cpu"))
    for slot, ids in enumerate(tokens):
        slots.admit(Admission(slot, slot, ids, 1, 0, seed=slot, path=0, sampling=numbers))
    token_ids = torch.zeros(len(tokens), max(map(len, tokens)), dtype=torch.int64)
    for row, ids in enumerate(tokens):
        token_ids[row, : len(ids)] = torch.tensor(ids)
    every = np.arange(len(tokens))
    return slots.at(slots.rows(every, torch.from_numpy(every)), every, np.array([len(ids) for ids in tokens]), token_ids)


@cache
def laws_by(K, **sampling):
    """The same logits for p and q as the exercise's, with the sampler's parameters on both, the text before included."""
    rows = text_rows([tokens_of(text, V) for text in range(num_texts(V, L + K))], V, **sampling)
    return Laws(*(probabilities(logits, rows)[0] for logits in make_logits(V, L + K, seed=0)))


def by_library(p, draft_ids, q, accept_uniforms, draw_uniforms):
    """The library's check, where all have K drafts."""
    num_drafts = torch.full((len(draft_ids),), draft_ids.shape[1])
    return verify(p, draft_ids, q, num_drafts, accept_uniforms, draw_uniforms).token_ids
