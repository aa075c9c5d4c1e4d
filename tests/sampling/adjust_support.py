"""Rows of logits through the adjustments of an engine, without an engine."""

import math

import numpy as np
import torch

from refimpl.outputs import Admission
from refimpl.sampling.adjustments import adjust
from refimpl.sampling.slots import SamplingSlots
from refimpl.sampling_numbers import SamplingNumbers


def slots_of(sequences, V, device="cpu", **options):
    """One slot for each (prompt, output, what it asks for)."""
    slots = SamplingSlots(len(sequences), V, torch.device(device), **options)
    for slot, (prompt, output, asked) in enumerate(sequences):
        slots.admit(
            Admission(slot, slot, (*prompt, *output), len(prompt), 0, seed=0, path=slot, sampling=SamplingNumbers(**asked))
        )
    return slots


def rows_of(sequences, V, device="cpu", **options):
    """The sampling rows of the sequences, all in one step; behind each one's tokens lies rubbish."""
    tokens = [[*prompt, *output] for prompt, output, _ in sequences]
    L = max(map(len, tokens)) + 3
    token_ids = torch.full((len(tokens), L), V - 1)
    for row, ids in enumerate(tokens):
        token_ids[row, : len(ids)] = torch.tensor(ids, dtype=torch.int64)
    slots, lengths = np.arange(len(tokens)), np.array([len(ids) for ids in tokens])
    sampling = slots_of(sequences, V, device, **options)
    rows = sampling.rows(slots, torch.arange(len(tokens), device=device))
    return sampling.at(rows, slots, lengths, token_ids.to(device))


def adjusted(logits, sequences, **options):
    """The logits that a token is drawn from, and what hooks did wrong."""
    rows = rows_of(sequences, logits.shape[1], **options)
    return (logits, {}) if rows.adjustments is None else adjust(logits, rows.adjustments)


def plain(logits, prompt, output, asked):
    """One row adjusted by the words of the parameters' docstrings, in their order and in Python's floats."""
    row, text = list(logits), [*prompt, *output]
    if allowed := asked.get("allowed_token_ids"):
        row = [x if i in allowed else -math.inf for i, x in enumerate(row)]
    for word in asked.get("bad_word_ids", ()):
        head = list(word[:-1])
        if not head or text[-len(head) :] == head:
            row[word[-1]] = -math.inf
    if len(output) < asked.get("min_tokens", 0):
        for i in asked.get("ending_ids", ()):
            row[i] = -math.inf
    for i, bias in asked.get("logit_bias", ()):
        row[i] += bias
    factor = asked.get("repetition_penalty", 1.0)
    for i in set(text):
        row[i] = row[i] / factor if row[i] > 0 else row[i] * factor
    for i in set(output):
        row[i] -= asked.get("frequency_penalty", 0.0) * output.count(i) + asked.get("presence_penalty", 0.0)
    return row
