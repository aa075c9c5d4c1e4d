"""When a sequence ends by itself: a stop id, a stop string in its text, its length, or a row that cannot go on."""

from __future__ import annotations

from typing import Protocol

from refimpl.outputs import BAD_LOGITS, NOTHING_LEFT
from refimpl.request import FinishReason, Sequence
from refimpl.row_extras import RowExtras


class TextWatch(Protocol):
    """Makes text of tokens, and finds stop strings in it. The scheduler, which sees no text, asks it."""

    def append(self, sequence: Sequence, token_id: int, silent: bool) -> str | None:
        """A sequence took a token; returns the stop string that its text completes. A ``silent`` token has no text."""

    def finish(self, sequence: Sequence) -> str | None:
        """A sequence ends; returns the stop string that ends its text, also one in what was held back until now."""


class NoText:
    """Where there is no tokenizer: nothing is found."""

    def append(self, sequence: Sequence, token_id: int, silent: bool) -> str | None:
        """Nothing."""

    def finish(self, sequence: Sequence) -> str | None:
        """Nothing."""


def stop(sequence: Sequence, token_id: int, eos_token_ids: frozenset[int], text: TextWatch) -> FinishReason | None:
    """Why a sequence ends with the token that it just took; None if it goes on. Sets its ``stop_reason``.

    The text of a token that stops by its id is left out, unless stop strings stay in the output too (vLLM's rule).
    """
    reason = _stop_by_id(sequence, token_id, eos_token_ids)
    silent = reason == "stop" and not sequence.request.params.include_stop_str_in_output
    if (found := text.append(sequence, token_id, silent)) is not None:
        sequence.stop_reason = found
        return "stop"
    return reason


def _stop_by_id(sequence: Sequence, token_id: int, eos_token_ids: frozenset[int]) -> FinishReason | None:
    params = sequence.request.params
    if token_id in eos_token_ids and not params.ignore_eos:
        return "stop"
    if token_id in params.stop_token_ids:
        sequence.stop_reason = token_id
        return "stop"
    if len(sequence.token_ids) - sequence.num_prompt_tokens >= sequence.request.max_tokens:
        return "length"
    return None


def failure_of(sequence: Sequence, token_id: int, extras: RowExtras | None) -> str | None:
    """Why a sequence cannot go on after what its row sent back, in a sentence; None if it can."""
    if extras is not None and extras.failure is not None:
        return extras.failure
    if token_id == BAD_LOGITS:
        return f"the model's logits at position {len(sequence.token_ids)} are not numbers"
    if token_id == NOTHING_LEFT:
        return "no token is left to draw: allowed_token_ids, bad_words, min_tokens and hooks forbid all of them"
    return None
