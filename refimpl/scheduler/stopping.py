"""When a sequence ends by itself: an end-of-sequence id, a stop token, or its length."""

from __future__ import annotations

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
