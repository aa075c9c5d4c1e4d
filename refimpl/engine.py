"""Engine: requests in, tokens out, one step at a time. Every host (LLM, CLI, server, notebook) drives this."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable

import msgspec

from refimpl.cache import PrefixCacheStats, Violation, audit, make_kv_cache_manager
from refimpl.cache.choose import check_parts
from refimpl.config import EngineArgs
from refimpl.errors import RefimplError, RequestError
from refimpl.executor.device import resolve_device
from refimpl.executor.executor import Executor
from refimpl.executor.local import LocalExecutor
from refimpl.explain import explain
from refimpl.gate import Gate
from refimpl.intake import Intake, check_kinds
from refimpl.interrupts import interrupts_between_steps
from refimpl.kernels.philox import branch
from refimpl.loading.checkpoint import open_checkpoint
from refimpl.memory_report import MemoryReport
from refimpl.output_processor import OutputProcessor
from refimpl.outputs import RequestOutput
from refimpl.recorder import Recorder
from refimpl.request import Request, Sequence
from refimpl.sampling_params import SamplingParams
from refimpl.scheduler import StepUpdate
from refimpl.scheduler.choose import make_scheduler
from refimpl.scheduler.policies import choose_policy
from refimpl.step_loop import StepLoop

log = logging.getLogger(__name__)

FINISHED_KEPT = 1000
"""Finished requests that ``explain`` still knows."""


class Engine:
    """The engine behind every host. Calls from several threads are served one after the other, between steps.

    Args:
        args: the options.

    Raises:
        ConfigError: options contradict each other or the model.
        ModelError: the model cannot be had, read or run.
        OutOfMemoryError: it does not fit.

    """

    def __init__(self, args: EngineArgs, clock: Callable[[], float] = time.monotonic) -> None:
        self.args = args
        self.clock = clock
        policy = choose_policy(args.scheduling_policy)
        check_parts(args)
        checkpoint = open_checkpoint(args.model)
        self.model_config = checkpoint.config
        model_limit = self.model_config.max_position_embeddings
        on_gpu = resolve_device(args.device).type == "cuda"
        # The naive way needs each token's id on the host before it can plan: no overlap.
        wanted = args.async_scheduling if args.async_scheduling is not None else on_gpu
        self._depth = 1 if wanted and args.enable_kv_cache else 0
        self.tokenizer = checkpoint.tokenizer()
        self._executor: Executor = LocalExecutor(
            args, checkpoint, args.checked_max_model_len(model_limit), asynchronous=self._depth > 0
        )
        try:
            config = args.scheduler_config(model_limit, self._executor.num_blocks * args.block_size)
            kv_cache_manager = make_kv_cache_manager(args, self._executor.num_blocks, config.max_model_len)
        except BaseException:
            self._executor.close()
            raise
        if config.max_model_len < (args.max_model_len or model_limit):
            log.info("max_model_len is lowered to %d tokens: that is what the KV cache holds", config.max_model_len)
        self.scheduler = make_scheduler(args, config, kv_cache_manager, self.model_config.eos_token_ids, clock, policy)
        self._intake = Intake(self.tokenizer, self.model_config, config.max_model_len, args.seed, clock)
        self._processor = OutputProcessor(self.tokenizer)
        overlap, token_text = self._depth > 0, self.tokenizer.token_text
        self._recorder = Recorder(
            checkpoint.name, config, kv_cache_manager, overlap, args.event_log_size, clock, token_text, self._executor
        )
        self.events = self._recorder.events
        self.gate = Gate()
        """Where who watches may hold the engine between two steps."""
        self._lock = threading.RLock()
        self._loop = StepLoop(self.scheduler, self._executor, self._recorder, self._depth)
        self._kept: list[RequestOutput] = []
        self._requests: dict[str, Request] = {}
        self._finished: OrderedDict[str, Request] = OrderedDict()
        self._closed = False
        self.num_aborted = 0  # requests, since the engine began

    # ------------------------------------------------------------------ requests

    def add_request(
        self,
        request_id: str,
        prompt: str | list[int],
        sampling_params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        user: str | None = None,
    ) -> None:
        """Queue a prompt: a text, or token ids. A text gets the special tokens that the tokenizer's configuration adds.

        ``priority`` and ``user`` are for the scheduling policy; cached prefixes are shared within a ``cache_salt`` only.

        Raises:
            PromptError: the prompt is empty, too long, or has ids outside the vocabulary.
            QueueFullError: ``max_num_queued_reqs`` samples wait already.
            RequestError: the id is taken, or another argument is wrong. Nothing is queued then.

        """
        check_kinds(request_id, sampling_params, priority)
        if priority != 0 and self.scheduler.policy.name == "fcfs":
            raise RequestError(
                f"priority is {priority}, but this engine serves in order of arrival; use scheduling_policy='priority'",
                request_id=request_id,
            )
        token_ids = self._intake.token_ids(request_id, prompt)
        with self._lock:
            self._check_open()
            self._check_id_is_free(request_id)
            text = prompt if isinstance(prompt, str) else None
            request = self._intake.make_request(
                request_id, text, token_ids, sampling_params, priority=priority, cache_salt=cache_salt, user=user
            )
            self.scheduler.add(request)
            self._accept(request)

    def _accept(self, request: Request) -> None:
        self._requests[request.request_id] = request
        self._intake.accept(request)

    def _check_id_is_free(self, request_id: str) -> None:
        if request_id in self._requests:
            raise RequestError(f"request id {request_id!r} is in use by an unfinished request", request_id=request_id)

    def abort(self, request_id: str | list[str]) -> None:
        """End requests wherever they are: waiting, in the middle of a prompt, or running. Nothing more comes of them.

        Unknown ids are no error.
        """
        with self._lock:
            request_ids = [request_id] if isinstance(request_id, str) else list(request_id)
            for one in request_ids:
                if (request := self._requests.get(one)) is not None:
                    self.num_aborted += 1
                    self.scheduler.abort(request)
                    self._retire(request)
            self._kept = [output for output in self._kept if output.request_id not in request_ids]
            self._loop.drain_if_idle()
            if not self.has_unfinished_requests():
                self._tell_news()

    def fork(self, request_id: str, new_id: str, sampling_params: SamplingParams | None = None, *, index: int = 0) -> None:
        """Branch off a sample of a running request: a new request whose prompt is everything that the sample holds so far.

        The two share all blocks of the cache until one of them writes; nothing is computed again. The branch draws on its
        own: with no seed of its own it takes its parent's, on another path. ``sampling_params`` are the parent's by default.

        Args:
            request_id: the parent.
            new_id: the id of the new request, which is stepped, aborted and explained like any other.
            sampling_params: of the new request; ``n`` must be 1.
            index: which of the parent's samples.

        Raises:
            RequestError: there is no such sample, it has ended, the new id is taken, or nothing fits behind it.

        """
        with self._lock:
            self._check_open()
            self._check_id_is_free(new_id)
            self._loop.drain()
            parent = self._sample(request_id, index)
            params = sampling_params or msgspec.structs.replace(parent.request.params, n=1)
            if params.n != 1:
                raise RequestError(f"n is {params.n}; a fork is one sample, fork again for more", request_id=new_id)
            request = self._intake.make_request(
                new_id,
                None,
                list(parent.token_ids),
                params,
                priority=parent.request.priority,
                cache_salt=parent.request.cache_salt,
                user=parent.request.user,
            )
            if params.seed is None:
                request.seed = parent.request.seed
            request.sequences[0].path = branch(parent.path, parent.num_forks)
            self.scheduler.fork(parent, request)
            parent.num_forks += 1
            self._accept(request)

    def _sample(self, request_id: str, index: int) -> Sequence:
        request = self._requests.get(request_id)
        if request is None:
            raise RequestError(f"no unfinished request {request_id!r} to fork", request_id=request_id)
        if not 0 <= index < len(request.sequences) or request.sequences[index].finished:
            raise RequestError(
                f"request {request_id!r} has no unfinished sample {index}; it began with {len(request.sequences)}",
                request_id=request_id,
            )
        return request.sequences[index]

    def is_unfinished(self, request_id: str) -> bool:
        """Whether more may come of a request."""
        return request_id in self._requests

    def has_unfinished_requests(self) -> bool:
        """Whether ``step`` has something left to do."""
        return self.can_step() or bool(self._kept)

    def can_step(self) -> bool:
        """Whether a step would compute something. Outputs that only wait to be returned do not count."""
        return self.scheduler.has_unfinished or self._loop.busy

    def _retire(self, request: Request) -> None:
        self._processor.forget(request)
        del self._requests[request.request_id]
        self._finished[request.request_id] = request
        self._finished.move_to_end(request.request_id)
        while len(self._finished) > FINISHED_KEPT:
            self._finished.popitem(last=False)

    # ------------------------------------------------------------------ the step

    def step(self) -> list[RequestOutput]:
        """Plan a step, submit it, take in the oldest outstanding one, and return what is new for users.

        With overlap, a step is planned and submitted before the one before it is taken in, so planning costs the device
        no time. A step that cannot be computed ends its requests with reason "error", and is logged; the engine and all
        other requests go on. Ctrl-C is taken after the step; what it brought is returned by the next call.
        """
        self._check_open()
        with interrupts_between_steps() as check_interrupt:
            self.gate.wait(check_interrupt)
            with self._lock:
                self._check_open()
                self._loop.step()
        with self._lock:
            return self._hand_out()

    def _hand_out(self) -> list[RequestOutput]:
        """What steps brought, as outputs. Nothing comes of requests that were aborted meanwhile."""
        news = [s for s in self._loop.take_news() if self._requests.get(s.request.request_id) is s.request]
        outputs, self._kept = self._kept + self._processor.process(news), []
        for output in (one for one in outputs if one.finished and one.request_id in self._requests):
            self._retire(self._requests[output.request_id])
        return outputs

    def keep_for_next_step(self, outputs: list[RequestOutput]) -> None:
        """Hand back outputs that were not meant for the caller: the next call of ``step`` returns them."""
        with self._lock:
            self._kept += outputs

    def step_by_hand(self) -> None:
        """Let the thread held at the gate take a step, or take one here. The next ``step`` returns what it brings.

        Raises:
            RefimplError: the engine is closed, or has nothing to do.

        """
        if self.gate.allow_if_held():
            return
        with self._lock:
            self._check_open()
            if not self.can_step():
                raise RefimplError("no request waits or runs; add one with engine.add_request, or call generate")
            self._loop.step()
            self._kept = self._hand_out()

    # ------------------------------------------------------------------ looking inside

    def _tell_news(self) -> None:
        """Record what happened since the last step when no further step will."""
        if self.scheduler.has_news:
            self._recorder.record(self.scheduler.schedule(), StepUpdate([]), self._recorder.plan_time(self.scheduler))

    def explain(self, request_id: str) -> str:
        """The story of a request: what was decided about it, when and why. The last 1,000 finished ones are known too.

        Raises:
            RequestError: no request of that id is known.

        """
        with self._lock:
            request = self._requests.get(request_id) or self._finished.get(request_id)
            if request is None:
                raise RequestError(
                    f"no request {request_id!r} is known; explain keeps unfinished ones and {FINISHED_KEPT} finished",
                    request_id=request_id,
                )
            waiting = self.scheduler.waiting
            before = {s.sequence_id: waiting.num_before(s) for s in request.sequences if waiting.waits(s)}
            return explain(request, before)

    @property
    def prefix_cache_stats(self) -> PrefixCacheStats:
        """Tokens looked up and found in the prefix cache, and blocks that it gave back, since the engine began."""
        cache = self.scheduler.kv.prefix_cache
        return PrefixCacheStats() if cache is None else dataclasses.replace(cache.stats)

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes. Running requests keep their blocks."""
        with self._lock:
            self.scheduler.kv.reset_prefix_cache()
            if not self.has_unfinished_requests():
                self._tell_news()

    def memory_report(self) -> MemoryReport:
        """Weights and KV cache in bytes: used, wasted, cached, free, and the same sequences in a contiguous cache."""
        with self._lock:
            self._check_open()
            return MemoryReport(
                device=self._executor.device_name,
                weight_bytes=self._executor.weight_bytes,
                block_bytes=self._executor.block_bytes,
                max_model_len=self.scheduler.config.max_model_len,
                usage=self.scheduler.usage(),
            )

    def audit(self) -> list[Violation]:
        """Check the cache's books from the outside; empty when all is right."""
        with self._lock:
            return audit(self.scheduler.snapshot())

    def close(self) -> None:
        """Abort what is unfinished and give threads and memory back. May be called twice."""
        with self._lock:
            if self._closed:
                return
            try:
                self.abort(list(self._requests))
            finally:
                self._closed = True
                self.gate.open()
                self._executor.close()

    def _check_open(self) -> None:
        if self._closed:
            raise RefimplError("this engine is closed; make a new one")
