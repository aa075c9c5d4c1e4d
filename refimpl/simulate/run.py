"""Simulation: the engine's own scheduler, cache and step loop over a simulated executor and given requests.

Everything but the device is real: policies, paging, preemption and swap, static batches, the recorder. There is no tokenizer
and no text, so nothing here needs torch, and a prompt is made-up tokens that no other prompt begins with.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from refimpl.cache import make_kv_cache_manager
from refimpl.cache.choose import check_parts
from refimpl.config import EngineArgs
from refimpl.errors import RefimplError, RequestError
from refimpl.events import EventLog
from refimpl.request import Request, Sequence
from refimpl.request_metrics import RequestMetrics
from refimpl.sampling_params import SamplingParams
from refimpl.scheduler.choose import make_scheduler
from refimpl.scheduler.limits import check_length
from refimpl.scheduler.policies import choose_policy
from refimpl.simulate.deployment import Deployment
from refimpl.simulate.executor import SimulatedExecutor, VirtualClock
from refimpl.simulate.tally import RequestLatency, Tally
from refimpl.simulate.workload import TraceRequest
from refimpl.step_loop import StepLoop

REFUSALS_KEPT = 5


class Simulation:
    """One run. ``run()`` serves everything; ``step()`` takes one step, for who wants to look between them.

    ``async_scheduling`` is on by default, as on a GPU; off for the hardware "cpu". Prefix caching should be off: these
    prompts have nothing in common, and keeping the books of it takes time.

    Args:
        args: the engine's options. ``model``, ``dtype``, ``device`` and the like are the deployment's business.
        deployment: model and devices.
        requests: in order of arrival. A prompt that cannot fit is refused alone, and counted; an answer that does not fit
            behind its prompt is cut at ``max_model_len``, as the engine does.
        price: US dollars for a device and hour; default: that of the hardware table.

    Raises:
        ConfigError: options contradict each other or the deployment.
        OutOfMemoryError: the model does not fit.

    """

    def __init__(
        self, args: EngineArgs, deployment: Deployment, requests: Iterable[TraceRequest], price: float | None = None
    ) -> None:
        check_parts(args)
        self.args, self.deployment = args, deployment
        self.price = deployment.hardware.price if price is None else price
        num_blocks = deployment.num_blocks(args.cache_config())
        self.config = args.scheduler_config(deployment.model.max_position_embeddings, num_blocks * args.block_size)
        num_host_blocks = deployment.num_host_blocks(args.swap_space, args.block_size)
        kv = make_kv_cache_manager(args, num_blocks, self.config.max_model_len, num_host_blocks)
        self.clock = VirtualClock()
        policy = choose_policy(args.scheduling_policy)
        self.executor = SimulatedExecutor(deployment, num_blocks, args.block_size, self.clock, num_host_blocks)
        eos, costs = deployment.model.eos_token_ids, self.executor.preemption_costs
        self.scheduler = make_scheduler(args, self.config, kv, eos, self.clock, policy, costs=costs)
        wanted = args.async_scheduling if args.async_scheduling is not None else deployment.hardware.name != "cpu"
        depth = 1 if wanted and args.enable_kv_cache else 0
        self.tally = Tally(
            deployment.model_name, self.config, kv, depth > 0, args.event_log_size, self.clock, token_text, self.executor
        )
        self._loop = StepLoop(self.scheduler, self.executor, self.tally, depth)
        self._coming = deque(requests)
        self._number = 0
        self._params: dict[int, SamplingParams] = {}
        """By output length: to check the same again for each request takes time."""
        self._idle_steps = 0
        self.refused: int = 0
        self.refusals: list[str] = []
        """The first few, as sentences."""
        self.cut: int = 0
        """Answers cut at ``max_model_len``."""

    @property
    def events(self) -> EventLog:
        """The event log, on the virtual clock."""
        return self.tally.events

    @property
    def latencies(self) -> list[RequestLatency]:
        """What each request that has ended waited for, in the order in which they ended."""
        return self.tally.latencies

    @property
    def pending(self) -> bool:
        """Whether a request is still to come, waits or runs."""
        return bool(self._coming or self.scheduler.sequences) or self._loop.busy

    def run(self, each: Callable[[int], None] | None = None) -> dict[str, Any]:
        """Serve everything and return the figures. ``each`` is told how many requests ended, whenever some did."""
        while self.pending:
            if (ended := self.step()) and each is not None:
                each(ended)
        return self.figures()

    def step(self) -> int:
        """Let those whose time has come arrive, then take one step, or wait for the next arrival. Returns how many ended.

        Raises:
            RefimplError: nothing moves any more; that is an error of the scheduler or of a part given to it.

        """
        before = self.refused
        if self._coming and self._coming[0].arrival <= self.clock.now:
            self._arrive()
        if self.scheduler.has_unfinished:
            steps, now = self.tally.steps, self.clock.now
            self._loop.step()
            moved = self.tally.steps > steps or self.clock.now > now or self._loop.busy
            self._idle_steps = 0 if moved else self._idle_steps + 1
            if self._idle_steps > 2:
                self._wait("nothing can be scheduled, and nothing is computed")
        elif self._loop.busy:
            self._loop.drain_if_idle()
        elif self._coming:
            self._wait("no request can arrive")
        return self._count() + self.refused - before

    def _wait(self, otherwise: str) -> None:
        if not self._coming:
            raise RefimplError(f"the simulation stands still at {self.clock.now:.3f} s: {otherwise}")
        self.clock.advance_to(self._coming[0].arrival)

    def _arrive(self) -> None:
        while self._coming and self._coming[0].arrival <= self.clock.now:
            came = self._coming.popleft()
            room = self.config.max_model_len - came.prompt
            self.cut += 0 < room < came.output
            number, self._number = self._number, self._number + 1
            try:
                check_length(came.prompt, self.config.max_model_len, str(number))  # before so many tokens are made up
                self.scheduler.add(self._request(number, came, min(came.output, room)))
            except RequestError as error:
                self.refused += 1
                if len(self.refusals) < REFUSALS_KEPT:
                    self.refusals.append(f"request {number}: {error}")

    def _request(self, number: int, came: TraceRequest, output: int) -> Request:
        """A request whose prompt begins like no other's."""
        vocab_size = self.deployment.model.vocab_size
        token_ids = [number % vocab_size, number // vocab_size % vocab_size, *([1] * (came.prompt - 2))][: came.prompt]
        params = self._params.get(output)
        if params is None:
            params = self._params[output] = SamplingParams(max_tokens=output, ignore_eos=True)
        metrics = RequestMetrics(came.arrival)
        request = Request(str(number), None, token_ids, params, seed=self.args.seed, max_tokens=output, metrics=metrics)
        request.sequences = [Sequence(number, request, 0, list(token_ids), came.prompt, path=number)]
        return request

    def _count(self) -> int:
        """Add up those that ended, and let go of them."""
        ended = [sequence.request for sequence in self._loop.take_news() if sequence.finish_reason is not None]
        if not ended:
            return 0
        for request in dict.fromkeys(ended):
            self.tally.count(request)
            request.sequences = []  # else the two hold each other until the garbage collector comes
        return len(ended)

    def figures(self) -> dict[str, Any]:
        """What came out so far; units as in :meth:`Tally.figures`, money in US dollars."""
        figures = self.tally.figures()
        seconds, tokens = figures["seconds"], figures["output_tokens"]
        hourly = self.price * self.deployment.tensor_parallel_size
        executor = self.executor
        computed = executor.busy_seconds - executor.transfer_seconds
        return figures | {
            "requests": self._number,
            "refused": self.refused,
            "refusals": self.refusals,
            "cut": self.cut,
            "busy": executor.busy_seconds / seconds if seconds else 0.0,
            "memory_bound": executor.memory_bound_seconds / computed if computed else 0.0,
            "blocks_swapped_out": executor.blocks_out,
            "blocks_swapped_in": executor.blocks_in,
            "swap_seconds": executor.transfer_seconds,
            "price_per_gpu_hour": self.price,
            "cost_per_million_tokens": hourly * seconds / 3600 / tokens * 1e6 if tokens else None,
            "num_blocks": executor.num_blocks,
            "num_host_blocks": executor.num_host_blocks,
            "max_model_len": self.config.max_model_len,
        }


_CONSONANTS, _VOWELS = "bdfgklmnprstvz", "aeiou"


def token_text(token_id: int) -> str:
    """A made-up word for a token that means nothing, so that pictures have something to show."""
    word, rest = " ", token_id + 1
    while rest:
        rest, syllable = divmod(rest, len(_CONSONANTS) * len(_VOWELS))
        word += _CONSONANTS[syllable // len(_VOWELS)] + _VOWELS[syllable % len(_VOWELS)]
    return word
