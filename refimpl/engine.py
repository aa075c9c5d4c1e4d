"""Engine: requests in, tokens out, one step at a time. Every host (LLM, CLI, server, notebook) drives this."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from numbers import Integral
from typing import Any

from refimpl.cache import KVCacheManager, Violation, audit
from refimpl.config import EngineArgs
from refimpl.errors import PromptError, RefimplError, RequestError
from refimpl.events import SCHEMA_VERSION, EventLog, LogHeader
from refimpl.executor.device import resolve_device
from refimpl.executor.executor import Executor
from refimpl.executor.local import LocalExecutor
from refimpl.explain import explain
from refimpl.kernels.philox import ROOT_PATH, branch, mix_seed
from refimpl.loading.checkpoint import open_checkpoint
from refimpl.output_processor import OutputProcessor
from refimpl.outputs import ModelRunnerOutput, RequestMetrics, RequestOutput, SchedulerOutput
from refimpl.recorder import PlanTime, record_step
from refimpl.request import Request, Sequence
from refimpl.sampling_params import SamplingParams
from refimpl.scheduler import Scheduler, StepUpdate

log = logging.getLogger(__name__)

FINISHED_KEPT = 1000
"""Finished requests that ``explain`` still knows."""


def _token_id(item: object, position: int, request_id: str) -> int:
    """An item of a prompt as an int; numpy's whole numbers are fine, True is not 1."""
    if not isinstance(item, bool) and isinstance(item, Integral):
        return int(item)
    raise PromptError(
        f"item {position} of the prompt is {item!r}; a prompt is a text or a list of token ids, whole numbers",
        request_id=request_id,
    )


@dataclass(frozen=True)
class _InFlight:
    """A step that was submitted and whose tokens are not taken in yet."""

    scheduler_output: SchedulerOutput
    future: Future[ModelRunnerOutput]
    planned: PlanTime


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
        checkpoint = open_checkpoint(args.model)
        self.model_config = checkpoint.config
        model_limit = self.model_config.max_position_embeddings
        on_gpu = resolve_device(args.device).type == "cuda"
        # The naive way needs each token's id on the host before it can plan: no overlap.
        overlap = args.async_scheduling if args.async_scheduling is not None else on_gpu
        self._depth = 1 if overlap and args.enable_kv_cache else 0
        self.tokenizer = checkpoint.tokenizer()
        self._executor: Executor = LocalExecutor(
            args, checkpoint, args.checked_max_model_len(model_limit), asynchronous=self._depth > 0
        )
        try:
            kv_cache_manager = KVCacheManager(self._executor.num_blocks, args.block_size)
            config = args.scheduler_config(model_limit, kv_cache_manager.capacity)
        except BaseException:
            self._executor.close()
            raise
        if config.max_model_len < (args.max_model_len or model_limit):
            log.info("max_model_len is lowered to %d tokens: that is what the KV cache holds", config.max_model_len)
        self.scheduler = Scheduler(config, kv_cache_manager, self.model_config.eos_token_ids, clock)
        self._processor = OutputProcessor(self.tokenizer)
        self._started_at = clock()
        self.events = EventLog(self._log_header(checkpoint.name), args.event_log_size)
        self._lock = threading.RLock()
        self._in_flight: deque[_InFlight] = deque()
        self._requests: dict[str, Request] = {}
        self._finished: OrderedDict[str, Request] = OrderedDict()
        self._num_arrived = 0
        self._num_sequences = 0
        self._closed = False

    def _log_header(self, model: str) -> LogHeader:
        try:
            installed = version("refimpl")
        except PackageNotFoundError:  # run from a checkout that is not installed
            installed = "unknown"
        config: dict[str, Any] = {
            "model": model,
            "block_size": self.args.block_size,
            "num_blocks": self.scheduler.kv.num_blocks,
            "max_num_seqs": self.scheduler.config.max_num_seqs,
            "max_num_batched_tokens": self.scheduler.config.max_num_batched_tokens,
            "max_model_len": self.scheduler.config.max_model_len,
            "enable_kv_cache": self.args.enable_kv_cache,
            "async_scheduling": self._depth > 0,
        }
        return LogHeader(SCHEMA_VERSION, installed, time.time(), "monotonic", config)

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

        ``cache_salt`` and ``user`` are kept with the request for prefix caches and policies; ``priority`` must be 0.

        Raises:
            PromptError: the prompt is empty, too long, or has ids outside the vocabulary.
            RequestError: the id is taken, or another argument is wrong. Nothing is queued then.

        """
        if not isinstance(sampling_params, SamplingParams):
            raise RequestError(
                f"sampling_params is a {type(sampling_params).__name__}; it must be a SamplingParams",
                request_id=request_id,
            )
        if priority != 0:
            raise RequestError(f"priority is {priority}; this engine serves in order of arrival, so it must be 0")
        token_ids = self._checked_prompt(request_id, prompt)
        with self._lock:
            self._check_open()
            if request_id in self._requests:
                raise RequestError(f"request id {request_id!r} is in use by an unfinished request", request_id=request_id)
            request = self._make_request(request_id, prompt, token_ids, sampling_params, cache_salt, user)
            self.scheduler.add(request)
            self._requests[request_id] = request
            self._num_arrived += 1
            self._num_sequences += sampling_params.n

    def _checked_prompt(self, request_id: str, prompt: str | list[int]) -> list[int]:
        """The prompt's token ids; tokenising is done in the caller's thread, never within a step."""
        if isinstance(prompt, str):
            try:
                token_ids = self.tokenizer.encode(prompt)
            except PromptError as error:
                error.request_id = request_id
                raise
        elif isinstance(prompt, list | tuple):
            token_ids = [_token_id(item, position, request_id) for position, item in enumerate(prompt)]
        else:
            raise PromptError(
                f"the prompt is a {type(prompt).__name__}; it must be a text or a list of token ids",
                request_id=request_id,
            )
        if not token_ids:
            raise PromptError("the prompt is empty; give at least one token", request_id=request_id)
        vocab_size = self.model_config.vocab_size
        for position, token_id in enumerate(token_ids):
            if not 0 <= token_id < vocab_size:
                raise PromptError(
                    f"token id {token_id} at position {position} of the prompt is outside the vocabulary: ids go from 0 to "
                    f"{vocab_size - 1}",
                    request_id=request_id,
                    token_id=token_id,
                    vocab_size=vocab_size,
                )
        return token_ids

    def _make_request(
        self,
        request_id: str,
        prompt: str | list[int],
        token_ids: list[int],
        params: SamplingParams,
        cache_salt: str | None,
        user: str | None,
    ) -> Request:
        room = self.scheduler.config.max_model_len - len(token_ids)
        request = Request(
            request_id=request_id,
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_token_ids=token_ids,
            params=params,
            seed=mix_seed(self.args.seed, self._num_arrived) if params.seed is None else params.seed,
            cache_salt=cache_salt,
            user=user,
            max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
            metrics=RequestMetrics(arrival_time=self.clock()),
        )
        request.sequences = [
            Sequence(
                sequence_id=self._num_sequences + index,
                request=request,
                index=index,
                token_ids=list(token_ids),
                num_prompt_tokens=len(token_ids),
                path=branch(ROOT_PATH, index),
            )
            for index in range(params.n)
        ]
        return request

    def abort(self, request_id: str | list[str]) -> None:
        """End requests wherever they are: waiting, in the middle of a prompt, or running. Unknown ids are no error."""
        with self._lock:
            for one in [request_id] if isinstance(request_id, str) else request_id:
                if (request := self._requests.get(one)) is not None:
                    self.scheduler.abort(request)
                    self._retire(request)
            self._drain_if_idle()
            if not self.has_unfinished_requests():
                self._tell_news()

    def has_unfinished_requests(self) -> bool:
        """Whether ``step`` has something left to do."""
        return self.scheduler.has_unfinished or bool(self._in_flight)

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

        With overlap, a step is planned and submitted before the one before it is taken in, so the device never waits.
        """
        with self._lock:
            self._check_open()
            scheduler_output = self.scheduler.schedule()
            planned = self._plan_time()
            exhausted = self._end_exhausted(scheduler_output)
            if scheduler_output.empty:
                self._record(scheduler_output, StepUpdate([]), planned)
            else:
                self._in_flight.append(_InFlight(scheduler_output, self._executor.submit(scheduler_output), planned))
                if len(self._in_flight) <= self._depth:
                    return exhausted
            outputs = exhausted + self._take_in_oldest()
            self._drain_if_idle()
            return outputs

    def _drain_if_idle(self) -> None:
        """Take in a step that was submitted before its only sequences turned out to have ended: all of it is discarded."""
        while self._in_flight and not self.scheduler.has_unfinished:
            self._take_in_oldest()

    def _take_in_oldest(self) -> list[RequestOutput]:
        if not self._in_flight:
            return []
        oldest = self._in_flight.popleft()
        try:
            runner_output = oldest.future.result()
        except BaseException as error:
            self._fail(oldest.scheduler_output, error)
            raise
        update = self.scheduler.update(oldest.scheduler_output, runner_output)
        outputs = self._finish_outputs(update.advanced)
        self._record(oldest.scheduler_output, update, oldest.planned)
        return outputs

    def _finish_outputs(self, advanced: list[Sequence]) -> list[RequestOutput]:
        outputs = self._processor.process(advanced)
        for output in outputs:
            if output.finished:
                self._retire(self._requests[output.request_id])
        return outputs

    def _end_exhausted(self, scheduler_output: SchedulerOutput) -> list[RequestOutput]:
        """Outputs of sequences that ended in planning, for want of blocks."""
        ended = {finish.sequence_id for finish in scheduler_output.exhausted}
        if not ended:
            return []
        samples = [s for request in self._requests.values() for s in request.sequences if s.sequence_id in ended]
        return self._finish_outputs(samples)

    def _fail(self, scheduler_output: SchedulerOutput, error: BaseException) -> None:
        """A step could not be computed: its requests end with an error; the engine and all others go on."""
        rows = set(scheduler_output.batch.sequence_ids)
        for request in tuple(self._requests.values()):
            if any(sequence.sequence_id in rows for sequence in request.sequences):
                for sequence in request.sequences:
                    sequence.stop_reason = f"the step failed: {error!r}"
                self.scheduler.abort(request, "error")
                self._retire(request)

    # ------------------------------------------------------------------ looking inside

    def _plan_time(self) -> PlanTime:
        scheduler = self.scheduler
        return PlanTime(self.clock(), scheduler.kv.num_free_blocks, len(scheduler.running), len(scheduler.waiting))

    def _record(self, scheduler_output: SchedulerOutput, update: StepUpdate, planned: PlanTime) -> None:
        news = (
            not scheduler_output.empty
            or scheduler_output.arrived
            or scheduler_output.aborted
            or scheduler_output.preempted
            or scheduler_output.exhausted
            or scheduler_output.decisions
        )
        if news and self.events.wanted:
            text = self.tokenizer.token_text
            record = record_step(scheduler_output, update, planned, self.clock(), self._started_at, text)
            self.events.append(record)

    def _tell_news(self) -> None:
        """Record what happened since the last step when no further step will."""
        if self.scheduler.has_news:
            self._record(self.scheduler.schedule(), StepUpdate([]), self._plan_time())

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

    def audit(self) -> list[Violation]:
        """Check the cache's books from the outside; empty when all is right."""
        with self._lock:
            running = {s.sequence_id: s.num_computed_tokens for s in self.scheduler.running}
            return audit(self.scheduler.kv.snapshot(running))

    def close(self) -> None:
        """Abort what is unfinished and give threads and memory back. May be called twice."""
        with self._lock:
            if self._closed:
                return
            self.abort(list(self._requests))
            self._closed = True
            self._executor.close()

    def _check_open(self) -> None:
        if self._closed:
            raise RefimplError("this engine is closed; make a new one")
