"""Log-probabilities as records: what an executor sends for one token, and what a user gets."""

from __future__ import annotations

import msgspec

LOGPROB_FLOOR = -9999.0
"""Handed out instead of minus infinity, which JSON cannot write. A token that far down is never drawn."""


class TokenLogprobs(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """One token of a sequence, and the most probable ones in its place, by the model's raw logits."""

    token_id: int
    logprob: float
    rank: int
    """1 for the most probable token. Of equally probable ones the lower id comes first."""
    top_ids: tuple[int, ...]
    """As many of the most probable ids as were asked for, the first first."""
    top_logprobs: tuple[float, ...]


class Logprob(msgspec.Struct, frozen=True, gc=False):
    """The log-probability of one token, for a user."""

    logprob: float
    """Natural logarithm, at least ``LOGPROB_FLOOR``."""
    rank: int
    """1 for the most probable token."""
    decoded_token: str | None = None
    """The token's text on its own; None where the request makes no text."""
