"""Generation: the prompts of one HTTP request as requests of the engine, whole or as they come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

import msgspec

from refimpl.async_llm import RequestStream
from refimpl.outputs import RequestOutput
from refimpl.sampling_params import SamplingParams
from refimpl.server.door import Visit
from refimpl.server.errors import of_sample
from refimpl.server.grammars import Kind
from refimpl.server.prompts import Prompt
from refimpl.server.protocol import SamplingFields
from refimpl.server.replies import CachedTokens, Usage
from refimpl.server.service import Service


class Generation:
    """Runs the prompts of a request; as a context, it ends them when it is left."""

    def __init__(self, service: Service, visit: Visit, request_id: str, counts_output: bool = True) -> None:
        self._service = service
        self._visit = visit
        self.request_id = request_id
        self._counts_output = counts_output
        """False where what is generated is dropped, and only the prompt is told."""
        self._streams: list[RequestStream] = []
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.completion_tokens = 0

    async def begin(
        self,
        request: SamplingFields,
        prompts: list[Prompt],
        params: SamplingParams,
        grammar: tuple[Kind, str] | None,
    ) -> None:
        """Make the requests of the engine.

        Raises:
            RefimplError: one is refused.
            ApiError: the grammar is.

        """
        salt = _salt(self._visit.tenant, request.cache_salt)
        for number, prompt in enumerate(prompts):
            chosen = params
            if grammar is not None:
                hook = await self._service.grammars.hook(*grammar, len(prompt.token_ids), params.n)
                chosen = msgspec.structs.replace(params, logits_hook=hook)
            stream = self._service.client.generate(
                prompt.token_ids,
                chosen,
                f"{self.request_id}-{number}" if len(prompts) > 1 else self.request_id,
                priority=request.priority or 0,
                cache_salt=salt,
                user=request.user,
            )
            self._streams.append(stream)
            self.prompt_tokens += len(prompt.token_ids)

    async def __aenter__(self) -> Generation:
        return self

    async def __aexit__(self, *_: object) -> None:
        for stream in self._streams:
            stream.abort()
        self._visit.told |= {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.completion_tokens}

    async def whole(self) -> list[RequestOutput]:
        """All outputs, in the order of the prompts.

        Raises:
            RefimplError: one was refused, or the engine failed.
            ApiError: a sample ended with an error.

        """
        if len(self._streams) == 1:
            outputs = [await self._streams[0]]
        else:
            outputs = list(await asyncio.gather(*map(_last, self._streams)))
        for output in outputs:
            self._count(output)
        return outputs

    async def pieces(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        """What is new, of whichever prompt: its number, and the output.

        Raises:
            RefimplError: one was refused, or the engine failed.
            ApiError: a sample ended with an error.

        """
        if len(self._streams) == 1:
            async for output in self._streams[0]:
                self._count(output)
                yield 0, output
            return
        async for number, output in _merged(self._streams):
            self._count(output)
            yield number, output

    def _count(self, output: RequestOutput) -> None:
        for sample in output.outputs:
            self.completion_tokens += len(sample.token_ids) if self._counts_output else 0
            if sample.finish_reason is not None and sample.finish_reason not in ("stop", "length"):
                raise of_sample(sample.finish_reason, sample.stop_reason)
        if output.finished:
            self.cached_tokens += output.num_cached_tokens

    def usage(self) -> Usage:
        """Tokens so far."""
        total = self.prompt_tokens + self.completion_tokens
        return Usage(self.prompt_tokens, self.completion_tokens, total, CachedTokens(self.cached_tokens))


def _salt(tenant: str | None, salt: str | None) -> str | None:
    """Whose cached prefixes a request may find: those of the same key, where there are several, and the same salt."""
    return salt if tenant is None else f"{tenant}:{salt or ''}"


async def _last(stream: RequestStream) -> RequestOutput:
    return await stream


async def _merged(streams: list[RequestStream]) -> AsyncIterator[tuple[int, RequestOutput]]:
    """The outputs of several streams as they come. Each is read only as fast as they are taken, so that they merge."""
    queue: asyncio.Queue[tuple[int, RequestOutput] | Exception | None] = asyncio.Queue(maxsize=1)

    async def read(number: int, stream: RequestStream) -> None:
        try:
            async for output in stream:
                await queue.put((number, output))
            await queue.put(None)
        except Exception as error:  # raised again below, in the task that answers
            await queue.put(error)

    tasks = [asyncio.create_task(read(number, stream)) for number, stream in enumerate(streams)]
    try:
        left = len(tasks)
        while left:
            item = await queue.get()
            if item is None:
                left -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError):
                await task
