"""Prompts: from what a request holds to token ids, off the event loop where that takes long."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from refimpl.async_llm import LONG_TEXT
from refimpl.errors import RefimplError
from refimpl.scheduler.limits import check_length
from refimpl.server.errors import bad_request, of_engine
from refimpl.server.protocol import ChatMessage
from refimpl.server.service import Service
from refimpl.tokenizer.tokenizer import Message

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""Those that a message may have, and what templates call them."""
MOST_CHARS_A_TOKEN = 256
"""A text with more characters than this for each token that fits is refused before it is tokenised."""


@dataclass(frozen=True)
class Prompt:
    """One prompt, ready for the engine."""

    token_ids: list[int]
    text: str | None = None
    """As it was given, if it was."""


@dataclass(frozen=True)
class Cut:
    """``truncate_prompt_tokens``, and what must fit beside the prompt."""

    keep: int | None
    max_tokens: int

    def apply(self, token_ids: list[int], service: Service) -> list[int]:
        """The end of a prompt that is kept; all of it, if nobody asked.

        Raises:
            ApiError: what is kept does not fit the model.

        """
        most = service.client.max_model_len
        if self.keep is not None:
            keep = max(1, most - max(1, self.max_tokens)) if self.keep == -1 else self.keep
            token_ids = token_ids[-keep:]
        try:
            check_length(len(token_ids), most, "")
        except RefimplError as error:
            raise of_engine(error) from error
        return token_ids


def make_cut(keep: int | None, max_tokens: int | None) -> Cut:
    """A cut that has been checked.

    Raises:
        ApiError: ``keep`` is no such number.

    """
    if keep is not None and keep != -1 and keep < 1:
        raise bad_request(
            f"truncate_prompt_tokens is {keep}; it must be -1 (as many as fit), or 1 and more", "truncate_prompt_tokens"
        )
    return Cut(keep, max_tokens or 1)


async def read_prompts(
    service: Service, given: str | Sequence[Any], cut: Cut, add_special_tokens: bool | None
) -> list[Prompt]:
    """The prompts of a completion: a text, texts, token ids, or lists of those.

    Raises:
        ApiError: it is a mixture or empty, there are too many, or one is too long.

    """
    if isinstance(given, str):
        return [await _of_text(service, given, cut, add_special_tokens)]
    kinds = {type(item) for item in given}
    if kinds == {int}:
        return [Prompt(cut.apply([*given], service))]
    if kinds not in ({str}, {list}):
        raise bad_request("prompt must be a text, a list of texts, a list of token ids, or a list of such lists", "prompt")
    service.limits.check_count("prompt", given, service.limits.max_prompts, "prompts")
    prompts = []
    for item in given:
        if isinstance(item, str):
            prompts.append(await _of_text(service, item, cut, add_special_tokens))
        else:
            prompts.append(Prompt(cut.apply(item, service)))
    return prompts


async def _of_text(service: Service, text: str, cut: Cut, add_special_tokens: bool | None) -> Prompt:
    token_ids = await tokenise(service, text, add_special_tokens is not False, whole=cut.keep is None)
    return Prompt(cut.apply(token_ids, service), text)


async def tokenise(service: Service, text: str, add_special_tokens: bool, whole: bool = True) -> list[int]:
    """The ids of a text; if all of it must fit the model, one that cannot is not looked at.

    Raises:
        ApiError: it is far too long, or holds what is no text.

    """
    most = service.client.max_model_len * MOST_CHARS_A_TOKEN
    if whole and len(text) > most:
        raise bad_request(
            f"the prompt has {len(text):,} characters; max_model_len = {service.client.max_model_len} tokens cannot hold so "
            "many. Shorten the prompt",
            "prompt",
            "context_length_exceeded",
        )
    encode = service.client.tokenizer.encode
    try:
        if len(text) > LONG_TEXT:
            return await asyncio.to_thread(encode, text, add_special_tokens)
        return encode(text, add_special_tokens)
    except RefimplError as error:
        raise of_engine(error) from error


async def read_chat(
    service: Service,
    messages: list[ChatMessage],
    cut: Cut,
    add_generation_prompt: bool | None,
    template_options: dict[str, Any] | None,
) -> Prompt:
    """The prompt of a conversation, through the model's own template.

    Raises:
        ApiError: a message is of a kind that this server does not read, or the template refuses it.

    """
    service.limits.check_count("messages", messages, service.limits.max_messages, "messages")
    plain = [_message(number, message) for number, message in enumerate(messages)]
    length = sum(len(message["content"]) for message in plain)
    if cut.keep is None and length > service.client.max_model_len * MOST_CHARS_A_TOKEN:
        raise bad_request(f"the messages have {length:,} characters, more than fit", "messages", "context_length_exceeded")
    render = service.client.tokenizer.apply_chat_template
    arguments = (plain, add_generation_prompt is not False, template_options or {})
    try:
        if length > LONG_TEXT:
            token_ids = await asyncio.to_thread(render, *arguments)
        else:
            token_ids = render(*arguments)
    except RefimplError as error:
        raise bad_request(str(error), "messages", "invalid_messages") from error
    return Prompt(cut.apply(token_ids, service))


def _message(number: int, message: ChatMessage) -> Message:
    if message.role not in ROLES or message.tool_calls or message.function_call or message.tool_call_id:
        raise bad_request(
            f"message {number} has the role {message.role[:100]!r}{' and calls' if message.role in ROLES else ''}; this "
            f"server reads {', '.join(ROLES)}, and no calls of tools",
            "messages",
            "unsupported",
        )
    content = message.content
    if isinstance(content, list):
        for part in content:
            if part.type != "text" or part.text is None:
                raise bad_request(
                    f"message {number} has a part of type {part.type[:100]!r}; this server reads text alone",
                    "messages",
                    "unsupported",
                )
        content = "".join(part.text or "" for part in content)
    if content is None:
        raise bad_request(f"message {number} has no content", "messages")
    name = {} if message.name is None else {"name": message.name}
    return {"role": ROLES[message.role], "content": content, **name}
