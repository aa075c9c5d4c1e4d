"""The requests as structs: OpenAI's fields, and vLLM's extra ones. Decoded by msgspec, strictly: "1" is no number.

Every field may be null, which is its default. Fields that are in none of these structs are ignored and named in the
answer's header ``X-Ignored-Fields``, as are those that only OpenAI's own service has a use for. Fields that would change
the text, and that this server has no answer to, are refused (:mod:`refimpl.server.refusals`).
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

Number = Annotated[float, Meta(description="A finite number.")]


class StreamOptions(msgspec.Struct, frozen=True):
    """What a stream tells beside the text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchema(msgspec.Struct, frozen=True):
    """The schema of ``response_format``."""

    schema: Annotated[dict[str, Any] | None, Meta(description="A JSON schema.")] = None
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True):
    """``text``, ``json_object``, or ``json_schema`` with a schema."""

    type: str
    json_schema: JsonSchema | None = None


class StructuredOutputs(msgspec.Struct, frozen=True):
    """vLLM's form: one of these says what the text must be."""

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: Annotated[str | None, Meta(description="A grammar in Lark's syntax.")] = None
    json_object: bool | None = None


class SamplingFields(msgspec.Struct, frozen=True, kw_only=True):
    """What both endpoints take: how tokens are drawn, and what is told of them."""

    model: str | None = None
    n: int | None = None
    max_tokens: int | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    logit_bias: dict[str, Number] | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    response_format: ResponseFormat | None = None
    # vLLM's
    top_k: int | None = None
    min_p: Number | None = None
    repetition_penalty: Number | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: Annotated[
        int | None, Meta(description="Keep so many tokens of the prompt's end; -1: as many as fit.")
    ] = None
    add_special_tokens: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None


class CompletionRequest(SamplingFields, frozen=True, kw_only=True):
    """The body of ``POST /v1/completions``."""

    prompt: Annotated[
        str | list[str | int | list[int]],
        Meta(description="A text, a list of texts, a list of token ids, or a list of such lists."),
    ]
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = None


class ContentPart(msgspec.Struct, frozen=True):
    """A part of a message; this server reads texts."""

    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct, frozen=True):
    """One message of a conversation."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[Any] | None = None
    tool_call_id: str | None = None
    function_call: Any = None


class ChatRequest(SamplingFields, frozen=True, kw_only=True):
    """The body of ``POST /v1/chat/completions``."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of ``POST /tokenize``: a prompt, or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of ``POST /detokenize``."""

    tokens: list[int]
    model: str | None = None
