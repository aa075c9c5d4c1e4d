"""Replicas: several engines of one model on one machine, behind the interface of one :class:`refimpl.AsyncLLM`.

::

    generate ─► tokenise ─► routing.choose(prefix, loads of those that live) ─► AsyncLLM of that replica ─► stream

Each replica is a whole engine with a cache of its own: on GPUs each has a device, on a CPU they share the threads. Nothing
else is shared between them but the process. A replica that is lost takes its requests with it; the others go on, and it gets
no more.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from refimpl.async_llm import LONG_TEXT, AsyncLLM
from refimpl.beam_params import BeamSearchParams
from refimpl.cache import Violation
from refimpl.closing import AsyncClosing
from refimpl.engine import Engine
from refimpl.errors import EngineFailedError, RequestError
from refimpl.intake import PreparedRequest
from refimpl.llm import Prompt, check_drawing, check_search, unwrap
from refimpl.memory_report import MemoryReport
from refimpl.sampling_params import SamplingParams
from refimpl.server.replica import Replica, RoutedStream, options_by_replica
from refimpl.server.routing import choose, prefix_key
from refimpl.tokenizer.tokenizer import Message, Tokenizer
from refimpl.watchdog import PATIENCE

T = TypeVar("T")


class Replicas(AsyncClosing):
    """N engines, used as one :class:`refimpl.AsyncLLM`: what that offers, this does too.

    ``engine`` is the first replica's, for what all share: tokenizer, configuration, limits. ``engines`` are all.

    Args:
        model: as for :class:`refimpl.LLM`.
        data_parallel_size: how many.
        options: any field of :class:`refimpl.EngineArgs`. On GPUs, replica i gets device ``cuda:i``. Parts that are objects
            (a policy, a prefix index) belong to one engine and cannot be given here; their names can.

    Raises:
        ConfigError: there are fewer GPUs than replicas, or an option is wrong.

    Example:
        >>> import asyncio
        >>> async def main():
        ...     async with Replicas("tiny", data_parallel_size=2) as llm:
        ...         output = await llm.generate("Hello", SamplingParams(max_tokens=4, ignore_eos=True))
        ...         return len(output.outputs[0].token_ids)
        >>> asyncio.run(main())
        4

    """

    def __init__(self, model: Any = "smollm2", data_parallel_size: int = 2, **options: Any) -> None:
        self.members: list[Replica] = []
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._owners: dict[str, Replica] = {}
        """By request, while it runs."""
        try:
            for number, given in enumerate(options_by_replica({"model": model, **options}, data_parallel_size)):
                self.members.append(Replica(str(number), AsyncLLM(**given)))
        except BaseException:
            self.close()
            raise

    # ------------------------------------------------------------------ routing

    @property
    def engine(self) -> Engine:
        """The first replica's engine."""
        return self.members[0].llm.engine

    @property
    def engines(self) -> list[Engine]:
        """The engines of all replicas, in their order."""
        return [replica.llm.engine for replica in self.members]

    def loads(self) -> dict[str, int]:
        """Unfinished requests of each replica that lives."""
        return {replica.name: replica.load for replica in self.members if replica.trouble() is None}

    def route(self, prepared: PreparedRequest) -> Replica:
        """The replica for a request.

        Raises:
            EngineFailedError: none is left.

        """
        key = prefix_key(prepared.token_ids, self.engine.args.block_size, prepared.cache_salt)
        if not (loads := self.loads()):
            raise EngineFailedError(f"no replica is left: {self.trouble()}")
        return self.members[int(choose(key, loads))]

    def claim(self, request_id: str, replica: Replica) -> None:
        """Give a request to a replica.

        Raises:
            RequestError: the id is in use, on whichever replica.

        """
        with self._lock:
            if request_id in self._owners:
                raise RequestError(f"request id {request_id!r} is in use by an unfinished request", request_id=request_id)
            self._owners[request_id] = replica
        replica.took()

    def release(self, request_id: str, replica: Replica, failed: bool | None) -> None:
        """A request is over; ``failed`` is None where that says nothing of the replica."""
        with self._lock:
            self._owners.pop(request_id, None)
        replica.gave(failed)

    def trouble(self, stuck_after: float = PATIENCE) -> str | None:
        """Why nothing can be generated, in a sentence; None while one replica answers."""
        found = [replica.trouble(stuck_after) for replica in self.members]
        return None if None in found else "; ".join(filter(None, found))

    # ------------------------------------------------------------------ requests

    def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, request_id: str | None = None, **options: Any
    ) -> RoutedStream:
        """As :meth:`refimpl.AsyncLLM.generate`.

        Raises:
            RequestError: an argument is wrong.

        """
        check_drawing(sampling_params)
        return self._stream(unwrap(prompt), sampling_params or SamplingParams(), request_id, options)

    def beam_search(
        self, prompt: Prompt, params: BeamSearchParams, request_id: str | None = None, **options: Any
    ) -> RoutedStream:
        """As :meth:`refimpl.AsyncLLM.beam_search`.

        Raises:
            RequestError: an argument is wrong.

        """
        check_search(params)
        return self._stream(unwrap(prompt), params, request_id, options)

    def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        add_generation_prompt: bool = True,
        **options: Any,
    ) -> RoutedStream:
        """As :meth:`refimpl.AsyncLLM.chat`.

        Raises:
            RequestError: the model has no chat template, the conversation does not fit it, or an argument is wrong.

        """
        check_drawing(sampling_params)
        prompt = self.engine.tokenizer.apply_chat_template(messages, add_generation_prompt)
        return self._stream(prompt, sampling_params or SamplingParams(), request_id, options)

    def _stream(self, prompt: str | list[int], params: Any, request_id: str | None, options: dict[str, Any]) -> RoutedStream:
        chosen = f"async-{next(self._numbers)}" if request_id is None else request_id
        long = len(prompt) > LONG_TEXT
        stream = RoutedStream(self, chosen)
        stream.prepare_with(lambda: self.engine.prepare(chosen, prompt, params, **options), later=long)
        return stream

    async def fork(
        self,
        request_id: str,
        new_id: str | None = None,
        sampling_params: SamplingParams | None = None,
        *,
        index: int = 0,
    ) -> RoutedStream:
        """Branch off a sample of a running request, on its replica (:meth:`refimpl.AsyncLLM.fork`).

        Raises:
            RequestError: there is no such sample, it has ended, the new id is taken, or nothing fits behind it.

        """
        owner = self._owners.get(request_id)
        if owner is None:
            raise RequestError(f"no unfinished request {request_id!r} to fork", request_id=request_id)
        chosen = f"async-{next(self._numbers)}" if new_id is None else new_id
        stream = RoutedStream(self, chosen)
        stream.join(owner)
        try:
            inner = await owner.llm.fork(request_id, chosen, sampling_params, index=index)
        except BaseException:
            stream.abort()
            raise
        stream.adopt(inner)
        return stream

    async def abort(self, request_id: str | list[str]) -> None:
        """End requests. Whoever waits for one gets a RequestError that says so. Unknown ids are no error."""
        await self._each(lambda llm: llm.abort(request_id))

    # ------------------------------------------------------------------ looking inside

    async def explain(self, request_id: str) -> str:
        """The story of a request, with the replica that it ran on (:meth:`refimpl.Engine.explain`).

        Raises:
            RequestError: no request of that id is known.

        """
        refused: RequestError | None = None
        for replica in self._alive():
            try:
                return f"on replica {replica.name}\n{await replica.llm.explain(request_id)}"
            except RequestError as error:
                refused = error
        raise refused or EngineFailedError(f"no replica is left: {self.trouble()}")

    async def audit(self) -> list[Violation]:
        """Check the caches' books of all replicas; empty when all is right."""
        return [violation for found in await self._each(lambda llm: llm.audit()) for violation in found]

    async def memory_report(self, replica: int = 0) -> MemoryReport:
        """What the memory of one replica holds."""
        return await self.members[replica].llm.memory_report()

    async def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes, on every replica."""
        await self._each(lambda llm: llm.reset_prefix_cache())

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.engine.tokenizer

    def _alive(self) -> list[Replica]:
        return [replica for replica in self.members if replica.trouble() is None]

    async def _each(self, ask: Callable[[AsyncLLM], Awaitable[T]]) -> list[T]:
        return list(await asyncio.gather(*(ask(replica.llm) for replica in self._alive())))

    # ------------------------------------------------------------------ the end

    def close(self) -> None:
        """Close every replica. May be called twice."""
        for replica in self.members:
            replica.llm.close()

    async def aclose(self) -> None:
        """The same, without holding up the event loop."""
        await asyncio.gather(*(replica.llm.aclose() for replica in self.members))
