"""Readout: logits, hidden states and prompt log-probabilities of positions that draw nothing, for requests that ask.

What was sent back of a sequence is not computed again while it keeps its slot (without a KV cache every step computes the
whole context). A sequence that takes a slot again sends all of it again; it is kept by position, so nothing is doubled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from refimpl.logprobs import TokenLogprobs
from refimpl.outputs import Admission
from refimpl.row_extras import RowExtras
from refimpl.sampling.logprobs import rows_in_a_slice, token_logprobs
from refimpl.sampling.sampler import usable

Head = Callable[[Tensor], Tensor]
"""Hidden states to logits."""


@dataclass
class _Reader:
    """What a slot's request wants read, and from which position on it was not sent back yet."""

    logprobs: int | None
    num_prompt_tokens: int
    logits: tuple[int, ...]
    hidden_states: tuple[int, ...]
    next_position: int


@dataclass(frozen=True)
class Read:
    """What is read of one row in one step. Positions are in the sequence; ``first_token`` is the row's place in the flat
    batch, less its first position, so that position p stands at ``first_token + p``.
    """

    row: int
    slot: int
    first_token: int
    prompt: range
    """Positions whose next token is of the prompt: its log-probability is asked for."""
    num_logprobs: int
    logits: tuple[int, ...]
    hidden_states: tuple[int, ...]


class Readout:
    """Keeps, for the slots that ask, what is still to be read."""

    def __init__(self, max_num_seqs: int) -> None:
        self._logprobs: dict[int, int] = {}
        self._readers: dict[int, _Reader] = {}
        # The host's copies, so that steps of rows that ask for nothing need not look.
        self._draws_logprobs = np.zeros(max_num_seqs, dtype=bool)
        self._reads = np.zeros(max_num_seqs, dtype=bool)

    def admit(self, admission: Admission) -> None:
        """Take in what the sequence that takes a slot asks for."""
        slot, asked, first = admission.slot, admission.sampling, admission.reads_from
        self._draws_logprobs[slot] = asked.logprobs is not None
        self._logprobs.pop(slot, None)
        if asked.logprobs is not None:
            self._logprobs[slot] = asked.logprobs
        logits = tuple(position for position in asked.return_logits if position >= first)
        hidden_states = tuple(position for position in asked.return_hidden_states if position >= first)
        wants_prompt = asked.prompt_logprobs is not None and first < admission.num_prompt_tokens
        self._reads[slot] = bool(wants_prompt or logits or hidden_states)
        self._readers.pop(slot, None)
        if self._reads[slot]:
            prompt = asked.prompt_logprobs if wants_prompt else None
            self._readers[slot] = _Reader(prompt, admission.num_prompt_tokens, logits, hidden_states, first)

    def logprob_counts(self, slots: np.ndarray) -> dict[int, int]:
        """For the rows whose drawn token's log-probability is asked for, how many others are."""
        if not self._logprobs:
            return {}
        return {row: self._logprobs[int(slots[row])] for row in np.flatnonzero(self._draws_logprobs[slots]).tolist()}

    def reads(self, slots: np.ndarray, starts: np.ndarray, counts: np.ndarray, offsets: np.ndarray) -> list[Read]:
        """What this step's rows are read for: row i computes ``counts[i]`` tokens from position ``starts[i]`` on, which
        begin at ``offsets[i]`` in the flat batch. Counts as sent.
        """
        found: list[Read] = []
        if not self._readers:
            return found
        for row in np.flatnonzero(self._reads[slots] & (counts > 0)).tolist():
            slot, start, end = int(slots[row]), int(starts[row]), int(starts[row] + counts[row])
            reader = self._readers[slot]
            first = max(start, reader.next_position)
            reader.next_position = max(end, reader.next_position)
            wants_prompt = reader.logprobs is not None
            read = Read(
                row=row,
                slot=slot,
                first_token=int(offsets[row]) - start,
                prompt=range(first, min(end, reader.num_prompt_tokens - 1) if wants_prompt else first),
                num_logprobs=reader.logprobs or 0,
                logits=tuple(position for position in reader.logits if first <= position < end),
                hidden_states=tuple(position for position in reader.hidden_states if first <= position < end),
            )
            if read.prompt or read.logits or read.hidden_states:
                found.append(read)
        return found


def read_row(
    read: Read, hidden: Float[Tensor, "T H"], token_ids: Int64[Tensor, "N L"], head: Head, vocab_size: int
) -> RowExtras:
    """Compute what is read of one row. ``token_ids`` are those of all slots; ``head`` makes logits of hidden states.

    The log-probabilities of a prompt are worked out in slices of rows. A position whose logits are no numbers fails the
    row's request.
    """
    prompt_logprobs: dict[int, TokenLogprobs] = {}
    size = rows_in_a_slice(vocab_size)
    for first in range(read.prompt.start, read.prompt.stop, size):
        positions = range(first, min(first + size, read.prompt.stop))
        logits = head(hidden[read.first_token + positions.start : read.first_token + positions.stop])
        if not bool((good := usable(logits)).all()):
            bad = positions[int(good.int().argmin())]
            return RowExtras(failure=f"the model's logits at position {bad + 1} are not numbers")
        next_ids = token_ids[read.slot, positions.start + 1 : positions.stop + 1]
        found = token_logprobs(logits, next_ids, [read.num_logprobs] * len(positions))
        prompt_logprobs |= zip((position + 1 for position in positions), found, strict=True)
    return RowExtras(
        prompt_logprobs=prompt_logprobs,
        logits={position: _array(head(_state(read, hidden, position))) for position in read.logits},
        hidden_states={position: _array(_state(read, hidden, position)) for position in read.hidden_states},
    )


def _state(read: Read, hidden: Float[Tensor, "T H"], position: int) -> Float[Tensor, "one H"]:
    return hidden[read.first_token + position].unsqueeze(0)


def _array(row: Float[Tensor, "one size"]) -> np.ndarray:
    return row[0].to(torch.float32).cpu().numpy()
