"""RowExtras: what a row of a step sends back beside its token, where its request asks for more."""

from __future__ import annotations

from typing import Any

import msgspec

from refimpl.logprobs import TokenLogprobs


class RowExtras(msgspec.Struct, frozen=True):
    """What a row sends back beside its token, where its request asks for it. Arrays are numpy's, float32."""

    logprobs: tuple[TokenLogprobs, ...] = ()
    """Of the token drawn, after those of the drafts that were accepted before it."""
    prompt_logprobs: dict[int, TokenLogprobs] = {}
    """By position in the prompt; position 0 has none."""
    logits: dict[int, Any] = {}
    """Raw logits ``[V]`` after the token at each position."""
    hidden_states: dict[int, Any] = {}
    """Last hidden state ``[H]`` of each position."""
    failure: str | None = None
    """Why the row's request cannot go on, in a sentence."""
