"""``POST /v1/completions``: prompts in, their continuations out."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass

import msgspec
from msgspec import UNSET

from refimpl.logprobs import Logprob
from refimpl.outputs import CompletionOutput, RequestOutput
from refimpl.server.errors import bad_request
from refimpl.server.event_writer import EventWriter, ReplyHead
from refimpl.server.exchange import Exchange
from refimpl.server.generation import Generation
from refimpl.server.grammars import asked_grammar
from refimpl.server.prompts import Prompt, make_cut, read_prompts
from refimpl.server.protocol import CompletionRequest
from refimpl.server.reading import read
from refimpl.server.replies import CompletionChoice, CompletionLogprobs, Reply
from refimpl.server.sampling import check_limits, count, sampling_params
from refimpl.server.service import Service
from refimpl.server.token_texts import Offsets, TokenNames, completion_logprobs
from refimpl.tokenizer.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 16
"""OpenAI's, for this endpoint."""


async def completions(service: Service, exchange: Exchange) -> None:
    """Answer a request.

    Raises:
        ApiError: it is refused, or fails.
        RefimplError: the engine refuses it, or fails.

    """
    request = read(exchange, CompletionRequest)
    name = service.model_name(request.model)
    max_tokens = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    _check(request, max_tokens)
    check_limits(request, service.limits, _num_prompts(request))
    grammar = asked_grammar(request, service.limits)
    logprobs = count("logprobs", request.logprobs, service.client.max_logprobs)
    prompt_logprobs = count("prompt_logprobs", request.prompt_logprobs, service.client.max_logprobs)
    if request.echo and logprobs is not None:
        prompt_logprobs = max(logprobs, prompt_logprobs or 0)
    params = sampling_params(
        request, max_tokens=max_tokens or 1, logprobs=logprobs, prompt_logprobs=prompt_logprobs, hook=None
    )
    cut = make_cut(request.truncate_prompt_tokens, max_tokens)
    prompts = await read_prompts(service, request.prompt, cut, request.add_special_tokens)
    head = ReplyHead(f"cmpl-{uuid.uuid4().hex}", "text_completion", int(time.time()), name)
    choices = CompletionChoices(request, prompts, service.client.tokenizer)
    async with Generation(service, exchange.visit, head.id, max_tokens > 0) as generation:
        await generation.begin(request, prompts, params, grammar)
        if request.stream:
            writer = EventWriter(exchange, head, request.stream_options, generation)
            async for number, output in generation.pieces():
                if new := choices.new(number, output):
                    await writer.tell(new)
            await writer.finish()
        else:
            outputs = await generation.whole()
            made = [choice for number, output in enumerate(outputs) for choice in choices.new(number, output)]
            reply = Reply(head.id, head.object, head.created, head.model, made, generation.usage())
            await exchange.reply(msgspec.json.encode(reply))


def _num_prompts(request: CompletionRequest) -> int:
    prompt = request.prompt
    return 1 if isinstance(prompt, str) or all(isinstance(item, int) for item in prompt) else len(prompt)


def _check(request: CompletionRequest, max_tokens: int) -> None:
    """What only makes sense together.

    Raises:
        ApiError: it does not.

    """
    n = 1 if request.n is None else request.n
    if request.best_of is not None and request.best_of != n:
        raise bad_request(
            f"best_of is {request.best_of} and n is {n}; this server gives all samples that it draws. Leave out best_of",
            "best_of",
            "unsupported",
        )
    if max_tokens == 0 and not request.echo:
        raise bad_request("max_tokens is 0; it must be 1 or more, but for echo=true", "max_tokens")
    if request.stream and request.prompt_logprobs is not None:
        raise bad_request("prompt_logprobs are not streamed; leave out stream", "prompt_logprobs")


@dataclass
class _Open:
    """A choice that was told of, and may be told of again."""

    offsets: Offsets | None


class CompletionChoices:
    """Makes the choices of a reply, or what is new of them, from outputs of the engine."""

    def __init__(self, request: CompletionRequest, prompts: list[Prompt], tokenizer: Tokenizer) -> None:
        self._request = request
        self._prompts = prompts
        self._tokenizer = tokenizer
        self._names = TokenNames(tokenizer, bool(request.return_tokens_as_token_ids))
        self._n = 1 if request.n is None else request.n
        self._skips = request.skip_special_tokens is not False
        self._scores_only = request.max_tokens == 0
        """Nothing is told but the prompt: one token is generated, and dropped."""
        self._open: dict[int, _Open] = {}
        self._prompt_logprobs: dict[int, list[dict[int, Logprob] | None]] = {}

    def new(self, number: int, output: RequestOutput) -> list[CompletionChoice]:
        """The choices of the prompt of that number of which there is something to tell."""
        if output.prompt_logprobs is not None:
            self._prompt_logprobs[number] = output.prompt_logprobs
        made = (self._choice(number, sample) for sample in output.outputs)
        return [choice for choice in made if choice is not None]

    def _choice(self, number: int, sample: CompletionOutput) -> CompletionChoice | None:
        request, index = self._request, number * self._n + sample.index
        open_choice, token_ids, text = self._open.get(index), sample.token_ids, sample.text
        first = open_choice is None
        if self._scores_only:
            token_ids, text = [], ""
        told_ids = bool(request.return_token_ids or request.logprobs is not None)
        if not (text or sample.finished or (first and request.echo) or (told_ids and token_ids)):
            return None  # its text is held back: it may become a stop string, or a character
        if open_choice is None:
            open_choice = self._open[index] = self._begin(number)
        logprobs = None
        if open_choice.offsets is not None:
            found = (sample.logprobs or [])[: len(token_ids)]
            logprobs = completion_logprobs(token_ids, [*found], open_choice.offsets.of(token_ids), self._names)
        if first and request.echo:
            text = self._prompt_text(number) + text
            logprobs = None if logprobs is None else self._with_prompt(number, logprobs)
        whole_prompt = first and request.return_token_ids
        return CompletionChoice(
            index=index,
            text=text,
            logprobs=logprobs,
            finish_reason="length" if self._scores_only and sample.finished else sample.finish_reason,
            stop_reason=None if self._scores_only else sample.stop_reason,
            token_ids=token_ids if request.return_token_ids else UNSET,
            prompt_token_ids=self._prompts[number].token_ids if whole_prompt else UNSET,
            prompt_logprobs=self._prompt_logprobs[number] if request.prompt_logprobs is not None else UNSET,
        )

    def _begin(self, number: int) -> _Open:
        if self._request.logprobs is None:
            return _Open(None)
        at = len(self._prompt_text(number)) if self._request.echo else 0
        return _Open(Offsets(self._tokenizer, self._skips, self._prompts[number].token_ids, at))

    def _prompt_text(self, number: int) -> str:
        prompt = self._prompts[number]
        if prompt.text is not None and self._request.truncate_prompt_tokens is None:
            return prompt.text
        return self._tokenizer.decode(prompt.token_ids, skip_special_tokens=self._skips)

    def _with_prompt(self, number: int, told: CompletionLogprobs) -> CompletionLogprobs:
        """The log-probabilities with those of the prompt before them."""
        token_ids, text = self._prompts[number].token_ids, self._prompt_text(number)
        whole = self._tokenizer.decode(token_ids, skip_special_tokens=False)
        offsets = Offsets(self._tokenizer, whole != text, []).of(token_ids)
        most = self._request.logprobs or 0
        found = [
            None if one is None else {i: each for i, each in one.items() if i == token_id or each.rank <= most}
            for token_id, one in zip(token_ids, self._prompt_logprobs[number], strict=True)
        ]
        prompt = completion_logprobs(token_ids, found, offsets, self._names)
        return CompletionLogprobs(
            prompt.text_offset + told.text_offset,
            prompt.token_logprobs + told.token_logprobs,
            prompt.tokens + told.tokens,
            prompt.top_logprobs + told.top_logprobs,
        )
