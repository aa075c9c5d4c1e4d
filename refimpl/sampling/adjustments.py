"""Adjustments: all that is done to the logits of some rows before temperature and filters.

::

    raw logits ─ allowed ids ─ bad words ─ min_tokens ─ bias ─ penalties ─ the engine's hook ─ the request's hook ─►

Everything here is a function of a row's token ids, of the length of its prompt, and of its parameters. Rows that ask for
nothing are not touched.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from refimpl.kernels.by_triton import by_triton
from refimpl.kernels.transfer import to_device
from refimpl.sampling.bad_words import forbid_last_tokens, tails
from refimpl.sampling.hooks import HookError, call_hooks
from refimpl.sampling.masks import add_bias, allow_only, forbid
from refimpl.sampling.penalties import apply_penalties
from refimpl.sampling_params import LogitsHook


@dataclass(frozen=True)
class Cells:
    """Single places in rows of logits: one row and one token id each, and a number where there is one to add."""

    rows: Int64[Tensor, "cells"]
    ids: Int64[Tensor, "cells"]
    values: Float[Tensor, "cells"] | None = None


@dataclass(frozen=True)
class Words:
    """Bad words of several tokens: word ``w`` is of row ``rows[w]``; see :func:`forbid_last_tokens`."""

    rows: Int64[Tensor, "W"]
    heads: Int64[Tensor, "W K"]
    lasts: Int64[Tensor, "W"]


@dataclass(frozen=True)
class Penalties:
    """The penalties of some rows."""

    rows: Int64[Tensor, "R2"]
    presence: Float[Tensor, "R2"]
    frequency: Float[Tensor, "R2"]
    repetition: Float[Tensor, "R2"]


@dataclass(frozen=True)
class Adjustments:
    """What is asked for, by ``A`` rows that ask for something. Row numbers within it count these rows alone."""

    rows: list[int]
    """Which rows of the step's logits they are."""
    token_ids: Int64[Tensor, "A L"]
    """Their tokens so far; what lies behind ``num_tokens`` is not read."""
    num_tokens: Int64[Tensor, "A"]
    num_prompt_tokens: Int64[Tensor, "A"]
    lengths: list[int]
    """``num_tokens``, as the host knows them."""
    allowed: Cells | None = None
    forbidden: Cells | None = None
    """Single tokens: bad words of one token, and what ends a text before ``min_tokens``."""
    words: Words | None = None
    bias: Cells | None = None
    penalties: Penalties | None = None
    hooks: dict[int, tuple[LogitsHook, ...]] = field(default_factory=dict)


def adjust(logits: Float[Tensor, "R V"], asked: Adjustments) -> tuple[Float[Tensor, "R V"], dict[int, str]]:
    """The logits with all adjustments made, in the order above; the argument is not changed.

    Also, for each row whose hook failed, a sentence about it; its logits are of no use then.
    """
    rows = to_device(torch.tensor(asked.rows), logits.device)
    chosen = logits[rows]
    if asked.allowed is not None:
        chosen = allow_only(chosen, asked.allowed.rows, asked.allowed.ids)
    if asked.forbidden is not None:
        chosen = forbid(chosen, asked.forbidden.rows, asked.forbidden.ids)
    if (words := asked.words) is not None:
        tail = tails(asked.token_ids, asked.num_tokens, words.heads.shape[1])
        chosen = forbid_last_tokens(chosen, words.rows, words.heads, words.lasts, tail)
    if asked.bias is not None and asked.bias.values is not None:
        chosen = add_bias(chosen, asked.bias.rows, asked.bias.ids, asked.bias.values)
    if asked.penalties is not None:
        chosen = _penalise(chosen, asked, asked.penalties)
    failures = _call_hooks(chosen, asked)
    return logits.index_copy(0, rows, chosen), {asked.rows[row]: text for row, text in failures.items()}


def _penalise(chosen: Float[Tensor, "A V"], asked: Adjustments, penalties: Penalties) -> Float[Tensor, "A V"]:
    rows = penalties.rows
    texts = (asked.token_ids[rows], asked.num_prompt_tokens[rows], asked.num_tokens[rows])
    numbers = (penalties.presence, penalties.frequency, penalties.repetition)
    if by_triton(chosen):
        from refimpl.kernels.penalties import penalise

        # In place, since ``chosen`` is a copy already; counts are cleared for each step, so that none depends on another.
        counts = torch.zeros(len(rows), chosen.shape[1], dtype=torch.int32, device=chosen.device)
        return penalise(chosen, rows, *texts, *numbers, counts)
    return chosen.index_copy(0, rows, apply_penalties(chosen[rows], *texts, *numbers))


def _call_hooks(chosen: Float[Tensor, "A V"], asked: Adjustments) -> dict[int, str]:
    """Write what hooks make of their rows into ``chosen``."""
    failures = {}
    for row, hooks in asked.hooks.items():
        try:
            chosen[row] = call_hooks(hooks, asked.token_ids[row, : asked.lengths[row]], chosen[row])
        except HookError as error:
            failures[row] = str(error)
    return failures
