"""ReplicasClient: what the server knows of several replicas, as :class:`refimpl.server.client.EngineClient` asks it."""

from __future__ import annotations

from refimpl.async_llm import RequestStream
from refimpl.sampling_params import SamplingParams
from refimpl.server.client import STUCK_AFTER, Load
from refimpl.server.router import Replicas


class ReplicasClient:
    """The replicas of this process; of one model, so the first one's numbers are those of all."""

    def __init__(self, llm: Replicas, stuck_after: float = STUCK_AFTER) -> None:
        self.llm = llm
        self.stuck_after = stuck_after
        engine = llm.engine
        self.tokenizer = engine.tokenizer
        self.vocab_size = engine.model_config.vocab_size
        self.eos_token_ids = tuple(engine.model_config.eos_token_ids)
        self.max_model_len = min(one.scheduler.config.max_model_len for one in llm.engines)
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
        """A request, by the replica that its prefix and the loads say."""
        return self.llm.generate(token_ids, params, request_id, priority=priority, cache_salt=cache_salt, user=user)

    def trouble(self) -> str | None:
        """Why nothing can be generated: no replica is left that answers."""
        return self.llm.trouble(self.stuck_after)

    def load(self) -> Load:
        """Sequences that run and wait, on all replicas."""
        schedulers = [engine.scheduler for engine in self.llm.engines]
        return Load(sum(len(one.running) for one in schedulers), sum(len(one.waiting) for one in schedulers))

    async def aclose(self) -> None:
        """Abort what runs, and give threads and memory back."""
        await self.llm.aclose()
