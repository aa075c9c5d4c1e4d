"""``POST /v1/chat/completions``: a conversation in, the assistant's answer out."""

from __future__ import annotations

import time
import uuid

import msgspec
from msgspec import UNSET

from refimpl.outputs import CompletionOutput, RequestOutput
from refimpl.server.errors import bad_request
from refimpl.server.event_writer import EventWriter, ReplyHead
from refimpl.server.exchange import Exchange
from refimpl.server.generation import Generation
from refimpl.server.grammars import asked_grammar
from refimpl.server.prompts import make_cut, read_chat
from refimpl.server.protocol import ChatRequest
from refimpl.server.reading import read
from refimpl.server.replies import ChatChoice, ChatDelta, ChatLogprobs, Delta, Message, Reply
from refimpl.server.sampling import check_limits, count, sampling_params
from refimpl.server.service import Service
from refimpl.server.token_texts import TokenNames, chat_logprobs
from refimpl.tokenizer.tokenizer import Tokenizer


async def chat(service: Service, exchange: Exchange) -> None:
    """Answer a request.

    Raises:
        ApiError: it is refused, or fails.
        RefimplError: the engine refuses it, or fails.

    """
    request = read(exchange, ChatRequest)
    name = service.model_name(request.model)
    _check(request)
    check_limits(request, service.limits, 1)
    max_tokens = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    params = sampling_params(
        request,
        max_tokens=max_tokens,
        logprobs=count("top_logprobs", request.top_logprobs or 0, service.client.max_logprobs) if request.logprobs else None,
        prompt_logprobs=count("prompt_logprobs", request.prompt_logprobs, service.client.max_logprobs),
        hook=None,
    )
    grammar = asked_grammar(request, service.limits)
    cut = make_cut(request.truncate_prompt_tokens, max_tokens)
    prompt = await read_chat(service, request.messages, cut, request.add_generation_prompt, request.chat_template_kwargs)
    kind = "chat.completion.chunk" if request.stream else "chat.completion"
    head = ReplyHead(f"chatcmpl-{uuid.uuid4().hex}", kind, int(time.time()), name)
    choices = ChatChoices(request, prompt.token_ids, service.client.tokenizer)
    async with Generation(service, exchange.visit, head.id) as generation:
        await generation.begin(request, [prompt], params, grammar)
        if request.stream:
            writer = EventWriter(exchange, head, request.stream_options, generation)
            async for _, output in generation.pieces():
                if new := choices.new(output):
                    await writer.tell(new)
            await writer.finish()
        else:
            [output] = await generation.whole()
            reply = Reply(head.id, head.object, head.created, head.model, choices.whole(output), generation.usage())
            await exchange.reply(msgspec.json.encode(reply))


def _check(request: ChatRequest) -> None:
    """What only makes sense together.

    Raises:
        ApiError: it does not.

    """
    if request.top_logprobs and not request.logprobs:
        raise bad_request("top_logprobs needs logprobs = true", "top_logprobs")
    if request.stream and request.prompt_logprobs is not None:
        raise bad_request("prompt_logprobs are not streamed; leave out stream", "prompt_logprobs")


class ChatChoices:
    """Makes the choices of a reply, or what is new of them, from outputs of the engine."""

    def __init__(self, request: ChatRequest, prompt_token_ids: list[int], tokenizer: Tokenizer) -> None:
        self._request = request
        self._prompt_token_ids = prompt_token_ids
        self._names = TokenNames(tokenizer, bool(request.return_tokens_as_token_ids))
        self._begun: set[int] = set()

    def whole(self, output: RequestOutput) -> list[ChatChoice]:
        """All choices."""
        request = self._request
        return [
            ChatChoice(
                index=sample.index,
                message=Message(sample.text),
                logprobs=self._logprobs(sample),
                finish_reason=sample.finish_reason,
                stop_reason=sample.stop_reason,
                token_ids=sample.token_ids if request.return_token_ids else UNSET,
                prompt_token_ids=self._prompt_token_ids if request.return_token_ids else UNSET,
                prompt_logprobs=output.prompt_logprobs if request.prompt_logprobs is not None else UNSET,
            )
            for sample in output.outputs
        ]

    def new(self, output: RequestOutput) -> list[ChatDelta]:
        """What is new of the choices; the first chunk of each says whose words follow."""
        deltas = []
        for sample in output.outputs:
            if sample.index not in self._begun:
                self._begun.add(sample.index)
                deltas.append(self._opening(sample.index))
            told_ids = self._request.return_token_ids or self._request.logprobs
            if sample.text or sample.finished or (told_ids and sample.token_ids):
                deltas.append(self._delta(sample))
        return deltas

    def _opening(self, index: int) -> ChatDelta:
        return ChatDelta(
            index=index,
            delta=Delta(role="assistant", content=""),
            logprobs=None,
            finish_reason=None,
            stop_reason=None,
            prompt_token_ids=self._prompt_token_ids if self._request.return_token_ids else UNSET,
        )

    def _delta(self, sample: CompletionOutput) -> ChatDelta:
        return ChatDelta(
            index=sample.index,
            delta=Delta(content=sample.text),
            logprobs=self._logprobs(sample),
            finish_reason=sample.finish_reason,
            stop_reason=sample.stop_reason,
            token_ids=sample.token_ids if self._request.return_token_ids else UNSET,
        )

    def _logprobs(self, sample: CompletionOutput) -> ChatLogprobs | None:
        if sample.logprobs is None:
            return None
        return chat_logprobs(sample.token_ids, sample.logprobs, self._request.top_logprobs or 0, self._names)
