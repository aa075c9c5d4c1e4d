"""AsyncLLM: the host for programs with an event loop. Many requests at once, each a stream of outputs."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import weakref
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import msgspec

from refimpl.beam_params import BeamSearchParams
from refimpl.cache import Violation
from refimpl.closing import AsyncClosing
from refimpl.config import EngineArgs
from refimpl.engine import Engine
from refimpl.errors import RefimplError
from refimpl.intake import PreparedRequest
from refimpl.llm import Prompt, check_drawing, check_search, unwrap
from refimpl.memory_report import MemoryReport
from refimpl.outputs import RequestOutput
from refimpl.sampling_params import SamplingParams
from refimpl.step_thread import Mailbox, StepThread
from refimpl.tokenizer.tokenizer import Message, Tokenizer
from refimpl.watchdog import PATIENCE

T = TypeVar("T")

LONG_TEXT = 20_000
"""Characters or token ids beyond which a prompt is prepared in a thread: in the event loop it would hold up all others."""


class RequestStream:
    """One request. ``async for`` gives its outputs as they come, of the kind that ``output_kind`` says; ``await`` the last.

    It begins when it is first waited for. Whoever leaves it (``break``, ``aclose``, a cancelled task, or nobody refers to it
    any more) aborts the request, and its blocks come back before the second step from then.

    Outputs that come faster than they are taken are merged: deltas are joined, of cumulative ones the last is kept.
    """

    def __init__(self, llm: AsyncLLM, thread: StepThread, request_id: str, mailbox: Mailbox | None = None) -> None:
        self.request_id = request_id
        self._llm = llm  # not to be closed, for want of references, while this runs
        self._thread = thread
        self._mailbox = mailbox
        self._prepare: Callable[[], PreparedRequest] = _begun_already
        self._prepared: PreparedRequest | None = None
        self._over = False
        self._waited_for = False

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._over:
            raise StopAsyncIteration
        if self._waited_for:
            raise RuntimeError(f"request {self.request_id!r} is waited for by another task; it has one reader")
        self._waited_for = True
        try:
            output = await (self._mailbox or await self._begin()).take()
        except BaseException:  # refused, failed, or the task was cancelled
            self.abort()
            raise
        finally:
            self._waited_for = False
        self._over = output.finished
        return output

    def __await__(self) -> Generator[Any, None, RequestOutput]:
        return self._whole().__await__()

    async def _whole(self) -> RequestOutput:
        if self._mailbox is not None:
            raise RuntimeError(f"request {self.request_id!r} has begun as a stream; wait for the whole from the start")
        await self._begin("final_only")
        return await anext(self)

    async def _begin(self, output_kind: str | None = None) -> Mailbox:
        prepared = self._prepared if self._prepared is not None else await asyncio.to_thread(self._prepare)
        if output_kind is not None:
            params = msgspec.structs.replace(prepared.params, output_kind=output_kind)
            prepared = replace(prepared, params=params)
        mailbox = Mailbox(asyncio.get_running_loop())
        mailbox.delta = prepared.params.output_kind == "delta"
        self._thread.add(prepared, mailbox)
        self._mailbox = mailbox
        return mailbox

    def prepare_with(self, prepare: Callable[[], PreparedRequest], later: bool) -> RequestStream:
        """Say how the request is checked and tokenised: at once, or ``later``, in a thread, when it begins.

        Raises:
            RequestError: an argument is wrong.

        """
        self._prepare = prepare
        self._prepared = None if later else prepare()
        return self

    def abort(self) -> None:
        """End the request, if it has not ended. Any thread may call this."""
        over, self._over = self._over, True
        if not over and self._mailbox is not None and self._thread.engine.is_open:
            with contextlib.suppress(RefimplError):  # closed this very moment
                self._thread.abort(self.request_id, self._mailbox)

    async def aclose(self) -> None:
        """Leave: end the request, if it has not ended."""
        self.abort()

    def __del__(self) -> None:
        if not getattr(self, "_over", True):
            self.abort()


class AsyncLLM(AsyncClosing):
    """A model, ready to generate for many callers at once, from any event loop and any thread.

    One thread steps the engine; everything else is asked of it and served between two steps. It has no event loop of its
    own, so it works in a notebook's cell (``await`` and ``async for`` at top level) as it does under ``asyncio.run``.
    ``engine`` is the engine behind it: other threads may look into it and abort, and ``engine.gate`` holds it. Requests are
    added here alone: one that is added to ``engine`` itself has no reader.

    Args:
        model: as for :class:`refimpl.LLM`.
        options: any field of :class:`refimpl.EngineArgs`.

    Example:
        >>> import asyncio
        >>> from refimpl import AsyncLLM, SamplingParams
        >>> async def main():
        ...     async with AsyncLLM("tiny") as llm:
        ...         async for output in llm.generate("Hello", SamplingParams(max_tokens=4, output_kind="delta")):
        ...             assert output.outputs[0].token_ids
        ...         whole = await llm.generate("Hello", SamplingParams(max_tokens=4))
        ...         return len(whole.outputs[0].token_ids)
        >>> asyncio.run(main())
        4

    """

    def __init__(self, model: Any = "smollm2", **options: Any) -> None:
        self.engine = Engine(EngineArgs.from_options({"model": model, **options}))
        self.step_thread = StepThread(self.engine)
        """Who steps the engine. Streams hand it their requests."""
        self._numbers = itertools.count()
        self._finalizer = weakref.finalize(self, self.step_thread.close)  # also at the exit of the interpreter

    # ------------------------------------------------------------------ requests

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        user: str | None = None,
    ) -> RequestStream:
        """Generate for one prompt: ``async for output in llm.generate(…)``, or ``output = await llm.generate(…)``.

        The prompt is tokenised here, in the caller's thread; a long text in a thread of its own when it is first waited for.

        Raises:
            RequestError: an argument is wrong. What only the engine can know (the id is taken, the prompt is too long, the
                queue is full) is raised when the first output is waited for. Other requests go on.

        """
        self.engine.check_open()
        check_drawing(sampling_params)
        given = unwrap(prompt)
        return self._stream(given, sampling_params, request_id, priority=priority, cache_salt=cache_salt, user=user)

    def beam_search(
        self,
        prompt: Prompt,
        params: BeamSearchParams,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        user: str | None = None,
    ) -> RequestStream:
        """Search for the most probable outputs of one prompt: ``output = await llm.beam_search(…)``.

        ``beam_width`` outputs, best first, as :meth:`refimpl.LLM.beam_search` gives them. A search says nothing until its
        end, so ``async for`` gives the one output too. Whoever leaves it aborts all of its beams.

        Raises:
            RequestError: as with :meth:`generate`.

        """
        self.engine.check_open()
        check_search(params)
        return self._stream(unwrap(prompt), params, request_id, priority=priority, cache_salt=cache_salt, user=user)

    def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        add_generation_prompt: bool = True,
        priority: int = 0,
        cache_salt: str | None = None,
        user: str | None = None,
    ) -> RequestStream:
        """Answer a conversation, a list of messages with role and content; the answer comes as from :meth:`generate`.

        Raises:
            RequestError: the model has no chat template, the conversation does not fit it, or an argument is wrong.

        """
        self.engine.check_open()
        check_drawing(sampling_params)
        prompt = self.engine.tokenizer.apply_chat_template(messages, add_generation_prompt)
        return self._stream(prompt, sampling_params, request_id, priority=priority, cache_salt=cache_salt, user=user)

    def _stream(
        self,
        prompt: str | list[int],
        params: SamplingParams | BeamSearchParams | None,
        request_id: str | None,
        **options: Any,
    ) -> RequestStream:
        chosen = self._new_id() if request_id is None else request_id
        params = SamplingParams() if params is None else params
        long = isinstance(prompt, str | list) and len(prompt) > LONG_TEXT
        stream = RequestStream(self, self.step_thread, chosen)
        return stream.prepare_with(lambda: self.engine.prepare(chosen, prompt, params, **options), later=long)

    def _new_id(self) -> str:
        return f"async-{next(self._numbers)}"  # no name that a user would give

    async def fork(
        self,
        request_id: str,
        new_id: str | None = None,
        sampling_params: SamplingParams | None = None,
        *,
        index: int = 0,
    ) -> RequestStream:
        """Branch off a sample of a running request (:meth:`refimpl.Engine.fork`). The branch runs from now on.

        Raises:
            RequestError: there is no such sample, it has ended, the new id is taken, or nothing fits behind it.

        """
        chosen = self._new_id() if new_id is None else new_id
        mailbox = Mailbox(asyncio.get_running_loop())

        def fork() -> None:
            params = self.engine.fork(request_id, chosen, sampling_params, index=index)
            mailbox.delta = params.output_kind == "delta"
            self.step_thread.expect(chosen, mailbox)

        stream = RequestStream(self, self.step_thread, chosen, mailbox)  # aborts it, if this wait is cancelled
        await self._ask(fork)
        return stream

    async def abort(self, request_id: str | list[str]) -> None:
        """End requests. Whoever waits for one gets a RequestError that says so. Unknown ids are no error."""
        await self._ask(lambda: self.engine.abort(request_id))

    # ------------------------------------------------------------------ looking inside

    async def explain(self, request_id: str) -> str:
        """The story of a request (:meth:`refimpl.Engine.explain`).

        Raises:
            RequestError: no request of that id is known.

        """
        return await self._ask(lambda: self.engine.explain(request_id))

    async def audit(self) -> list[Violation]:
        """Check the cache's books from the outside; empty when all is right."""
        return await self._ask(self.engine.audit)

    async def memory_report(self) -> MemoryReport:
        """What the memory holds: weights and KV cache, used, wasted, cached and free; ``print`` shows it as a table."""
        return await self._ask(self.engine.memory_report)

    async def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes. Running requests keep their blocks."""
        await self._ask(self.engine.reset_prefix_cache)

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.engine.tokenizer

    def trouble(self, patience: float = PATIENCE) -> str | None:
        """Why nothing comes of requests, in a sentence: the engine has ended, lost a rank, or has been in one step for too
        many seconds. None while all is well. Any thread may ask, and is answered at once.
        """
        return self.step_thread.trouble(patience)

    async def _ask(self, function: Callable[[], T]) -> T:
        """Have a function run in the engine's thread between two steps."""
        return await asyncio.wrap_future(self.step_thread.call(function))

    # ------------------------------------------------------------------ the end

    def close(self) -> None:
        """Abort everything, and give threads and memory back. Waits for the step at hand. May be called twice."""
        self._finalizer()
        self.step_thread.close()  # if another thread is closing it right now: wait, too

    async def aclose(self) -> None:
        """The same, without holding up the event loop."""
        if self.engine.lock.in_its_process and not self.engine.lock.in_callback:
            await asyncio.shield(asyncio.wrap_future(self.step_thread.begin_to_close()))
        self.close()


def _begun_already() -> PreparedRequest:
    raise RuntimeError("this request has begun already")
