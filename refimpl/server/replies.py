"""The replies as structs, field by field what OpenAI's clients read, with vLLM's additions left out where not asked for."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType


class CachedTokens(msgspec.Struct, frozen=True):
    """Of the tokens of the prompt."""

    cached_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """Tokens of all prompts and all choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """Four lists, one entry a token."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class TopLogprob(msgspec.Struct, frozen=True):
    """One of the most probable tokens at a place."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(msgspec.Struct, frozen=True):
    """One token of an answer."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """Those of an answer."""

    content: list[ChatLogprob]
    refusal: None = None


class Extras(msgspec.Struct, frozen=True, kw_only=True):
    """What a client must ask for, in a choice."""

    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: Any = UNSET


class CompletionChoice(Extras, frozen=True, kw_only=True):
    """A choice of a completion, or what is new of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None


class Message(msgspec.Struct, frozen=True):
    """The assistant's answer."""

    content: str
    role: str = "assistant"
    refusal: None = None


class ChatChoice(Extras, frozen=True, kw_only=True):
    """A choice of a chat."""

    index: int
    message: Message
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None


class Delta(msgspec.Struct, frozen=True):
    """What is new of an answer."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatDelta(Extras, frozen=True, kw_only=True):
    """A choice of a chat in a stream."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None


class Reply(msgspec.Struct, frozen=True):
    """The whole answer of either endpoint."""

    id: str
    object: str
    created: int
    model: str
    choices: list[Any]
    usage: Usage
    system_fingerprint: str | None = None
    service_tier: str | None = None
