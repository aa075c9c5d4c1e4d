"""``POST /tokenize`` and ``POST /detokenize``: between texts and token ids, as vLLM has it."""

from __future__ import annotations

import asyncio

import msgspec
from msgspec import UNSET, UnsetType

from refimpl.async_llm import LONG_TEXT
from refimpl.server.errors import bad_request
from refimpl.server.exchange import Exchange
from refimpl.server.prompts import make_cut, read_chat, tokenise
from refimpl.server.protocol import DetokenizeRequest, TokenizeRequest
from refimpl.server.reading import read
from refimpl.server.service import Service


class Tokens(msgspec.Struct, frozen=True):
    """The ids of a text."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | UnsetType = UNSET


class Text(msgspec.Struct, frozen=True):
    """The text of ids."""

    prompt: str


async def tokenize(service: Service, exchange: Exchange) -> None:
    """Answer with the ids of a text, or of a conversation.

    Raises:
        ApiError: the request is wrong.

    """
    request = read(exchange, TokenizeRequest)
    service.model_name(request.model)
    if (request.prompt is None) == (request.messages is None):
        raise bad_request("give either prompt or messages", "prompt")
    if request.messages is not None:
        options = (make_cut(None, 1), request.add_generation_prompt, request.chat_template_kwargs)
        token_ids = (await read_chat(service, request.messages, *options)).token_ids
    else:
        token_ids = await tokenise(service, request.prompt or "", request.add_special_tokens is not False)
    strings = UNSET if not request.return_token_strs else [service.client.tokenizer.token_text(i) for i in token_ids]
    await exchange.reply(msgspec.json.encode(Tokens(len(token_ids), service.client.max_model_len, token_ids, strings)))


async def detokenize(service: Service, exchange: Exchange) -> None:
    """Answer with the text of ids.

    Raises:
        ApiError: the request is wrong.

    """
    request = read(exchange, DetokenizeRequest)
    service.model_name(request.model)
    for token_id in request.tokens:
        if not 0 <= token_id < service.client.vocab_size:
            raise bad_request(
                f"token id {token_id} is outside the vocabulary: ids go from 0 to {service.client.vocab_size - 1}", "tokens"
            )
    decode = service.client.tokenizer.decode
    if len(request.tokens) > LONG_TEXT:
        text = await asyncio.to_thread(decode, request.tokens, False)
    else:
        text = decode(request.tokens, False)
    await exchange.reply(msgspec.json.encode(Text(text)))
