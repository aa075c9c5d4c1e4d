"""When a sequence ends by itself: an end-of-sequence id, a stop token, its length, or a row that cannot go on."""

from __future__ import annotations

from refimpl.outputs import BAD_LOGITS, NOTHING_LEFT, RowExtras
from refimpl.request import FinishReason, Sequence


def stop(sequence: Sequence, token_id: int, eos_token_ids: frozenset[int]) -> FinishReason | None:
    """Why a sequence ends with the token that it just took; None if it goes on. Sets its ``stop_reason``."""
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
