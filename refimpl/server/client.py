"""EngineClient: all that the server knows of an engine, or of several that a router stands before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec

from refimpl.async_llm import AsyncLLM, RequestStream
from refimpl.sampling_params import SamplingParams
from refimpl.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from refimpl.engine import Engine
    from refimpl.server.router import Replicas

STUCK_AFTER = 60.0
"""Seconds that a step may take before the engine counts as stuck."""


class Load(msgspec.Struct, frozen=True):
    """How much an engine has to do."""

    num_running: int
    num_waiting: int


class EngineClient(Protocol):
    """What the server asks for. All but ``aclose`` answer at once, and may be called in an event loop."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Logits a row."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The model's end-of-sequence ids."""

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and output."""

    @property
    def max_logprobs(self) -> int:
        """Most log-probabilities a token that may be asked for; -1: no limit."""

    def generate(
        self,
        token_ids: list[int],
        params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        user: str | None = None,
    ) -> RequestStream:
        """A request, as :meth:`refimpl.AsyncLLM.generate` makes it."""

    def trouble(self) -> str | None:
        """Why nothing can be generated now, in a sentence; None while all is well."""

    def load(self) -> Load:
        """What runs and waits."""

    async def aclose(self) -> None:
        """End it."""


class LocalClient:
    """One engine of this process, or several replicas of one model; ``engines`` are those behind ``llm``."""

    def __init__(self, llm: AsyncLLM | Replicas, engines: Sequence[Engine], stuck_after: float = STUCK_AFTER) -> None:
        self.llm = llm
        self.stuck_after = stuck_after
        self._engines = engines
        engine = engines[0]
        self.tokenizer = engine.tokenizer
        self.vocab_size = engine.model_config.vocab_size
        self.eos_token_ids = tuple(engine.model_config.eos_token_ids)
        self.max_model_len = min(one.scheduler.config.max_model_len for one in engines)
        self.max_logprobs = engine.args.max_logprobs

    def generate(
        self,
        token_ids: list[int],
        params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        user: str | None = None,
    ) -> RequestStream:
        """A request, as :meth:`refimpl.AsyncLLM.generate` makes it."""
        return self.llm.generate(token_ids, params, request_id, priority=priority, cache_salt=cache_salt, user=user)

    def trouble(self) -> str | None:
        """Whether no engine is left whose thread and ranks live, and that has not been in one step for too long."""
        return self.llm.trouble(self.stuck_after)

    def load(self) -> Load:
        """Sequences that run and wait, as they are at this moment, whether or not a step is under way."""
        schedulers = [engine.scheduler for engine in self._engines]
        return Load(sum(len(one.running) for one in schedulers), sum(len(one.waiting) for one in schedulers))

    async def aclose(self) -> None:
        """Abort what runs, and give threads and memory back."""
        await self.llm.aclose()
