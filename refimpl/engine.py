"""Engine: requests in, tokens out, one step at a time. Every host (LLM, CLI, server, notebook) drives this."""

from __future__ import annotations

import dataclasses
import logging
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from refimpl.beam_params import BeamSearchParams
from refimpl.cache import PrefixCacheStats, Violation, audit, make_kv_cache_manager
from refimpl.cache.choose import check_parts
from refimpl.cache.kv_cache import LayerKV
from refimpl.config import EngineArgs
from refimpl.engine_lock import EngineLock
from refimpl.errors import RefimplError, RequestError
from refimpl.executor.device import resolve_device
from refimpl.executor.executor import kv_cache_of, step_threads_of
from refimpl.explain import explain
from refimpl.gate import Gate
from refimpl.intake import Intake, PreparedRequest
from refimpl.interrupts import interrupts_between_steps
from refimpl.loading.checkpoint import open_checkpoint
from refimpl.memory_report import MemoryReport
from refimpl.output_processor import OutputProcessor
from refimpl.outputs import RequestOutput
from refimpl.parallel.executor import make_executor
from refimpl.parts import claim
from refimpl.recorder import Recorder
from refimpl.request import Request
from refimpl.request_book import RequestBook
from refimpl.sampling_params import SamplingParams
from refimpl.scheduler.choose import make_scheduler
from refimpl.scheduler.policies import choose_policy
from refimpl.step_loop import StepLoop

log = logging.getLogger(__name__)


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
        self.args, self.clock, self._closed = args, clock, True  # until everything is there
        claim(self, scheduling_policy=args.scheduling_policy, prefix_index=args.prefix_index)
        policy = choose_policy(args.scheduling_policy)
        check_parts(args)
        checkpoint = open_checkpoint(args.model)
        self.model_config, self.tokenizer = checkpoint.config, checkpoint.tokenizer()
        model_limit = self.model_config.context_limit(args.max_model_len)
        overlap = args.overlaps(resolve_device(args.device).type == "cuda")
        executor = self.executor = make_executor(args, checkpoint, args.checked_max_model_len(model_limit), overlap)
        """What computes the steps. To be looked at: only the engine orders them."""
        weakref.finalize(self, executor.close).atexit = False  # dropped without close; a process's end frees anyway
        try:
            config = args.scheduler_config(model_limit, executor.num_blocks * args.block_size)
            kv = make_kv_cache_manager(args, executor.num_blocks, config.max_model_len, executor.num_host_blocks)
            if config.max_model_len < (args.max_model_len or model_limit):
                log.info("max_model_len is lowered to %d tokens: that is what the KV cache holds", config.max_model_len)
            self._processor, eos = OutputProcessor(self.tokenizer), self.model_config.eos_token_ids
            costs, hooks, token_text = executor.preemption_costs, executor.logits_hooks, self.tokenizer.token_text
            self.scheduler = make_scheduler(args, config, kv, eos, clock, policy, self._processor, costs, executor.drafting)
            self._intake = Intake(self.tokenizer, self.model_config, config.max_model_len, args, clock, hooks)
            size, most = args.event_log_size, args.num_speculative_tokens
            self._recorder = Recorder(checkpoint.name, config, kv, overlap, size, clock, token_text, executor, most)
        except BaseException:
            executor.close()
            raise
        self.events, self.gate = self._recorder.events, Gate()
        """Where who watches may hold the engine between two steps."""
        self.lock = EngineLock(step_threads_of(executor))
        self._loop = StepLoop(self.scheduler, self.executor, self._recorder, depth=int(overlap))
        self.due_in = self._loop.pace.due_in  # seconds for which the next step can wait: who comes meanwhile is in it
        self._book, self._kept = RequestBook(), list[RequestOutput]()
        self.known_requests = self._book.known  # of an id, to be looked at: the unfinished one, and the last that ended
        self.num_aborted, self._closed = 0, False  # requests, since the engine began

    # ------------------------------------------------------------------ requests

    def add_request(
        self,
        request_id: str,
        prompt: str | list[int],
        sampling_params: SamplingParams | BeamSearchParams,
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
        self.queue(self.prepare(request_id, prompt, sampling_params, priority=priority, cache_salt=cache_salt, user=user))

    def prepare(
        self, request_id: str, prompt: str | list[int], sampling_params: SamplingParams | BeamSearchParams, **options: Any
    ) -> PreparedRequest:
        """The first half of :meth:`add_request`, which raises what that one would: check and tokenise. Waits for no step."""
        prepared = self._intake.prepare(request_id, prompt, sampling_params, **options)
        if prepared.priority != 0 and self.scheduler.policy.name == "fcfs":
            raise RequestError(
                f"priority is {prepared.priority}, but this engine serves in order of arrival; use "
                "scheduling_policy='priority'",
                request_id=request_id,
            )
        return prepared

    def queue(self, prepared: PreparedRequest) -> None:
        """The second half: queue what was prepared, or raise what :meth:`add_request` would."""
        with self.lock.alone("add_request"):
            self.check_open()
            self._book.check_free(prepared.request_id)
            request = self._intake.make_request(prepared)
            self.scheduler.add(request)
            self._book.add(request)
            self._intake.accept(request)

    def abort(self, request_id: str | list[str]) -> None:
        """End requests wherever they are (in a callback: when its step ends). Unknown ids are no error."""
        request_ids = [request_id] if isinstance(request_id, str) else list(request_id)
        if self.lock.in_callback:
            self._book.doom(request_ids)
        else:
            with self.lock:
                self._abort(request_ids)

    def _abort(self, request_ids: list[str]) -> None:
        for request in filter(None, map(self._book.unfinished, request_ids)):
            self.num_aborted += 1
            self.scheduler.abort(request)
            self._retire(request)
        self._kept = [output for output in self._kept if output.request_id not in request_ids]
        self._loop.drain_if_idle()
        if not self.has_unfinished_requests():
            self._loop.tell_news()

    def fork(
        self, request_id: str, new_id: str, sampling_params: SamplingParams | None = None, *, index: int = 0
    ) -> SamplingParams:
        """Branch off a sample of a running request: a new request whose prompt is everything that the sample holds so far.

        The two share all blocks of the cache until one of them writes; nothing is computed again. The branch draws on its
        own: with no seed of its own it takes its parent's, on another path. ``index`` says which of the parent's samples;
        ``sampling_params``, the parent's by default, are for one sample (``n`` = 1). Returned are those that the branch has.

        Raises:
            RequestError: there is no such sample, it has ended, the new id is taken, or nothing fits behind it.

        """
        with self.lock.alone("fork"):
            self.check_open()
            self._book.check_free(new_id)
            self._loop.drain()
            parent = self._book.sample(request_id, index)
            request = self._intake.make_branch(parent, new_id, sampling_params)
            self.scheduler.fork(parent, request)
            parent.num_forks += 1
            self._book.add(request)
            self._intake.accept(request)
            return request.params

    def is_unfinished(self, request_id: str) -> bool:
        """Whether more may come of a request."""
        return self._book.unfinished(request_id) is not None

    def unfinished_request_ids(self) -> list[str]:
        """The ids of all requests of which more may come, in order of arrival."""
        return self._book.unfinished_ids

    def has_unfinished_requests(self) -> bool:
        """Whether ``step`` has something left to do."""
        return self.can_step() or bool(self._kept)

    def can_step(self) -> bool:
        """Whether a step would compute something. Outputs that only wait to be returned do not count."""
        return self.scheduler.has_unfinished or self._loop.busy

    def _retire(self, request: Request) -> None:
        self._processor.forget(request)
        self._intake.forget(request)
        self._book.retire(request)

    # ------------------------------------------------------------------ the step

    def step(self, while_held: Callable[[], None] | None = None) -> list[RequestOutput]:
        """Plan a step, submit it, take in the oldest outstanding one, and return what is new for users.

        With overlap, a step is planned and submitted before the one before it is taken in, so planning costs the device
        no time. A step that cannot be computed ends its requests with reason "error", and is logged; the engine and all
        other requests go on. Ctrl-C is taken after the step; what it brought is returned by the next call.

        ``while_held`` is called about every 50 ms while the gate holds the engine before the step. Then nothing stays in
        flight: who watches sees all that was computed.
        """
        self.check_open()
        with interrupts_between_steps() as check_interrupt:

            def meanwhile() -> None:
                check_interrupt()
                self.check_open()
                if while_held is not None:
                    while_held()

            if not self._take_in_if_held():
                self.gate.wait(meanwhile)
                with self.lock:
                    self.check_open()
                    self._loop.step()
                self._take_in_if_held()
        with self.lock:
            return self._hand_out()

    def _take_in_if_held(self) -> bool:
        """Take in the steps in flight if the gate holds the next one; whether there were any."""
        with self.lock.alone("step"):
            return self.gate.holds and self._loop.drain()

    def _hand_out(self) -> list[RequestOutput]:
        """What steps brought, as outputs. Nothing comes of requests that were aborted meanwhile."""
        if doomed := self._book.take_doomed():
            self._abort(doomed)
        requests = dict.fromkeys([sequence.request for sequence in self._loop.take_news()])
        outputs, self._kept = self._kept + self._processor.process(self._book.only_unfinished(requests)), []
        for output in outputs:
            if output.finished and (request := self._book.unfinished(output.request_id)) is not None:
                self._retire(request)
        return outputs

    def keep_for_next_step(self, outputs: list[RequestOutput]) -> None:
        """Hand back outputs that were not meant for the caller: the next call of ``step`` returns them."""
        with self.lock:
            self._kept += outputs

    def step_by_hand(self) -> None:
        """Let the thread held at the gate take a step, or take one here. The next ``step`` returns what it brings.

        Raises:
            RefimplError: the engine is closed, or has nothing to do.

        """
        if self.gate.allow_if_held():
            return
        with self.lock.alone("step_by_hand"):
            self.check_open()
            if not self.can_step():
                raise RefimplError("no request waits or runs; add one with engine.add_request, or call generate")
            self._loop.step()
            self._loop.drain()
            self._kept = self._hand_out()

    # ------------------------------------------------------------------ looking inside

    def explain(self, request_id: str) -> str:
        """The story of a request: what was decided about it, when and why. The last 1,000 finished ones are known too.

        Raises:
            RequestError: no request of that id is known.

        """
        with self.lock:
            request = self._book.find(request_id)
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
        with self.lock.alone("reset_prefix_cache"):
            self.scheduler.kv.reset_prefix_cache()
            if not self.has_unfinished_requests():
                self._loop.tell_news()

    def memory_report(self) -> MemoryReport:
        """Weights and KV cache in bytes: used, wasted, cached, free, and the same sequences in a contiguous cache."""
        with self.lock:
            self.check_open()
            return MemoryReport.of(self.executor, self.scheduler.config.max_model_len, self.scheduler.usage())

    def read_blocks(self, layer: int, block_ids: Iterable[int]) -> LayerKV:
        """Copies of the keys and values that some blocks hold in a layer, to look at; block ids are those of block tables.

        Raises:
            RefimplError: there is no such layer or block, or this engine computes without a model.

        """
        with self.lock.alone("read_blocks"):
            self.check_open()
            self._loop.drain()
            return kv_cache_of(self.executor).read(layer, block_ids)

    def audit(self) -> list[Violation]:
        """Check the cache's books from the outside; empty when all is right."""
        with self.lock:
            return audit(self.scheduler.snapshot())

    def close(self) -> None:
        """Abort what is unfinished and give threads and memory back. May be called twice. In a forked child, nothing."""
        if not self.lock.in_its_process:
            return
        with self.lock.alone("close"):
            if self._closed:
                return
            try:
                self._abort(self._book.unfinished_ids)
            finally:
                self._closed = True
                self.gate.open()
                self.executor.close()

    @property
    def is_open(self) -> bool:
        """Whether it can be used: it is not closed, and this is its process."""
        return not self._closed and self.lock.in_its_process

    def check_open(self) -> None:
        """See that the engine can be used.

        Raises:
            RefimplError: it is closed, or this process is a fork of its own.

        """
        self.lock.check_process()
        if self._closed:
            raise RefimplError("this engine is closed; make a new one")
