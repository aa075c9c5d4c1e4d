"""When a sequence ends by itself: a stop id, a stop string in its text, its length, or a row that cannot go on."""

from __future__ import annotations

from typing import Protocol

from refimpl.outputs import BAD_LOGITS, NOTHING_LEFT
from refimpl.request import FinishReason, Sequence
from refimpl.row_extras import RowExtras


class TextWatch(Protocol):
    """Makes text of tokens, and finds stop strings in it. The scheduler, which sees no text, asks it.

    It is asked about samples with stop strings alone: text that can end nothing is made when somebody reads it.
    """

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
    params = sequence.request.params
    reason: FinishReason | None = None
    if token_id in eos_token_ids and not params.ignore_eos:
        reason = "stop"
    elif token_id in params.stop_token_ids:
        reason, sequence.stop_reason = "stop", token_id
    elif len(sequence.token_ids) >= sequence.most_tokens:
        reason = "length"
    if params.stop:
        silent = reason == "stop" and not params.include_stop_str_in_output
        if (found := text.append(sequence, token_id, silent)) is not None:
            reason, sequence.stop_reason = "stop", found
    return reason


def failure_of(sequence: Sequence, token_id: int, extras: RowExtras | None) -> str | None:
    """Why a sequence cannot go on after what its row sent back, in a sentence; None if it can."""
    if extras is not None and extras.failure is not None:
        return extras.failure
    if token_id == BAD_LOGITS:
        return f"the model's logits at position {len(sequence.token_ids)} are not numbers"
    if token_id == NOTHING_LEFT:
        return "no token is left to draw: allowed_token_ids, bad_words, min_tokens and hooks forbid all of them"
    return None
