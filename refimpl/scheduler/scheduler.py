"""Scheduler: continuous batching. Before each step it decides which sequences compute how many tokens, and says why.

Orca (Yu et al. 2022) for scheduling by the iteration, Sarathi-Serve (Agrawal et al. 2024) for chunked prefills that share
a step with decodes, vLLM (Kwon et al. 2023) for preemption by recompute.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

from refimpl.cache.kv_cache_manager import KVCacheManager
from refimpl.config import SchedulerConfig
from refimpl.errors import PromptError
from refimpl.outputs import (
    BAD_LOGITS,
    NO_TOKEN,
    Arrival,
    Decision,
    Finish,
    ModelRunnerOutput,
    Preemption,
    SchedulerOutput,
)
from refimpl.request import FinishReason, Request, Sequence, Status
from refimpl.scheduler.plan import EMPTY_BATCH, StepPlan
from refimpl.scheduler.request_queue import RequestQueue


@dataclass
class StepUpdate:
    """What came of one step."""

    token_ids: list[int]
    """One a row: the token that its sequence took, or ``NO_TOKEN``."""
    advanced: list[Sequence] = field(default_factory=list)
    """Sequences that took a token or ended, in row order."""
    finished: list[Finish] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)


class Scheduler:
    """The queue, the running sequences, and the decisions. First come, first served; the newest is preempted first."""

    def __init__(
        self,
        config: SchedulerConfig,
        kv_cache_manager: KVCacheManager,
        eos_token_ids: tuple[int, ...],
        clock: Callable[[], float],
    ) -> None:
        self.config = config
        self.kv = kv_cache_manager
        self.step = 0
        """The number of the next step."""
        self.waiting = RequestQueue()
        self.running: list[Sequence] = []
        """Sequences that hold a slot, oldest first."""
        self.sequences: dict[int, Sequence] = {}
        """All that have not ended, by id."""
        self._eos_token_ids = frozenset(eos_token_ids)
        self._clock = clock
        self._free_slots = list(range(config.max_num_seqs))
        self._last_batch = EMPTY_BATCH
        self._arrived: list[Arrival] = []
        self._aborted: list[Finish] = []
        self._decisions: list[Decision] = []
        self._deciding_step = 0
        self._last_wait: tuple[int, str] | None = None
        self._forced: dict[int, list[tuple[str, str]]] = {}

    # ------------------------------------------------------------------ requests come and go

    def add(self, request: Request) -> None:
        """Put a request's samples into the queue.

        Raises:
            PromptError: it could never run, even alone.

        """
        self._check_fits(request)
        self._arrived.append(
            Arrival(
                request.request_id,
                tuple(sequence.sequence_id for sequence in request.sequences),
                tuple(request.prompt_token_ids),
            )
        )
        for sequence in request.sequences:
            self._decide(
                sequence,
                "arrived",
                prompt=sequence.num_prompt_tokens,
                max_tokens=request.max_tokens,
                ahead=len(self.waiting),
            )
            self.sequences[sequence.sequence_id] = sequence
            self.waiting.push(sequence)

    def _check_fits(self, request: Request) -> None:
        prompt, limit = len(request.prompt_token_ids), self.config.max_model_len
        if prompt >= limit:
            raise PromptError(
                f"the prompt has {prompt} tokens; with at least one to generate, at most {limit - 1} fit "
                f"max_model_len = {limit}. Shorten the prompt or raise max_model_len",
                request_id=request.request_id,
                prompt_tokens=prompt,
                max_model_len=limit,
            )
        if self.kv.blocks_for(prompt + 1) > self.kv.num_blocks:
            raise PromptError(
                f"the prompt of {prompt} tokens and one more need {self.kv.blocks_for(prompt + 1)} blocks; the whole cache "
                f"has {self.kv.num_blocks}. Shorten the prompt or enlarge the cache",
                request_id=request.request_id,
                needed=self.kv.blocks_for(prompt + 1),
                blocks=self.kv.num_blocks,
            )
        longest, budget = prompt + request.max_tokens - 1, self.config.max_num_batched_tokens
        if not self.config.enable_kv_cache and longest > budget:
            raise PromptError(
                f"without a KV cache each step computes the whole context: {prompt} prompt tokens and up to "
                f"{request.max_tokens} more exceed max_num_batched_tokens = {budget}. Raise it, or lower max_tokens",
                request_id=request.request_id,
                context=longest,
                budget=budget,
            )

    def abort(self, request: Request, reason: FinishReason = "abort") -> None:
        """End a request's samples, wherever they are. Their blocks come back at once."""
        for sequence in request.sequences:
            if not sequence.finished:
                self._aborted.append(self._finish(sequence, reason))

    @property
    def has_unfinished(self) -> bool:
        """Whether a sequence waits or runs."""
        return bool(self.sequences)

    @property
    def has_news(self) -> bool:
        """Whether something happened that no step has told yet."""
        return bool(self._arrived or self._aborted)

    def preempt_at(self, step: int, request_id: str, mode: str = "recompute") -> None:
        """For tests: force a preemption of a request's running samples when ``step`` is planned."""
        self._forced.setdefault(step, []).append((request_id, mode))

    # ------------------------------------------------------------------ planning a step

    def schedule(self) -> SchedulerOutput:
        """Plan the next step.

        There is no prefill phase and no decode phase. Each sequence has ``num_computed_tokens`` catching up with
        ``num_tokens``; a step gives each some new tokens to compute under one budget: many for a fresh prompt, the rest of
        a chunk, or one for a sequence that decodes. Running sequences come first, oldest first, so decodes are never
        held up by a prompt; what is left of the budget admits waiting ones. When blocks run out, the newest running
        sequence gives its own back and waits.

        Everything decided here counts as done at once: ``num_computed_tokens`` is advanced, blocks are taken. So a
        further step can be planned before this one's tokens are known.
        """
        plan = StepPlan(self.step, self.config.max_num_batched_tokens)
        self._deciding_step = self.step
        self._force_preemptions(plan)
        self._continue_running(plan)
        if not plan.preempted:
            self._admit_waiting(plan)
        output = plan.freeze(self._last_batch, self._arrived, self._aborted, self._decisions)
        self._arrived, self._aborted, self._decisions = [], [], []
        self._last_batch = output.batch
        self.step = self._deciding_step = self.step + 1
        return output

    def _continue_running(self, plan: StepPlan) -> None:
        for sequence in tuple(self.running):
            if sequence.status is not Status.RUNNING:
                continue  # it gave way to an older one in this loop
            num_new_tokens = self._num_new_tokens(sequence, plan.budget)
            if num_new_tokens and (block_ids := self._make_room(sequence, num_new_tokens, plan)) is not None:
                if not self.config.enable_kv_cache:
                    self._restart(sequence, plan)
                self._add(sequence, num_new_tokens, block_ids, plan)

    def _num_new_tokens(self, sequence: Sequence, budget: int) -> int:
        """Tokens that a sequence would compute now, at most ``budget``; 0 if all its tokens are ordered already."""
        if self._ending(sequence):
            return 0
        if not self.config.enable_kv_cache:
            return sequence.num_tokens if sequence.num_tokens <= budget else 0
        missing = sequence.num_tokens - sequence.num_computed_tokens
        if missing > budget and not self.config.enable_chunked_prefill:
            return 0
        return min(missing, budget)

    @staticmethod
    def _ending(sequence: Sequence) -> bool:
        """Whether its last token is ordered: it only waits for the update that ends it."""
        return sequence.num_output_tokens >= sequence.request.max_tokens

    def _make_room(self, sequence: Sequence, num_new_tokens: int, plan: StepPlan) -> list[int] | None:
        """Take the blocks for a running sequence's new tokens, from newer sequences if need be; None: not in this step."""
        upto = num_new_tokens if not self.config.enable_kv_cache else sequence.num_computed_tokens + num_new_tokens
        while (block_ids := self.kv.allocate(sequence.sequence_id, upto)) is None:
            victim = self._newest_victim(plan)
            assert victim is not None, "the sequence that needs room is itself a candidate"
            if victim is not sequence:
                self._preempt(victim, plan, cause=f"{sequence.name} needs a block and is older")
                continue
            others = [other for other in self.running if other is not sequence]
            if any(self._ending(other) for other in others) or (not others and sequence.num_tokens_in_flight):
                self._wait(sequence, "waits_update")
            elif not others:
                self._exhaust(sequence, plan)
            else:
                self._preempt(sequence, plan, cause="the pool is empty and all others are older")
            return None
        return block_ids

    def _newest_victim(self, plan: StepPlan) -> Sequence | None:
        """The newest running sequence that is not in this step's rows and has something left to do."""
        planned = set(plan.sequence_ids)
        for sequence in reversed(self.running):
            if sequence.sequence_id not in planned and not self._ending(sequence):
                return sequence
        return None

    def _admit_waiting(self, plan: StepPlan) -> None:
        while (sequence := self.waiting.head()) is not None:
            if sequence.num_tokens_in_flight:
                return None  # preempted with a token in flight: its id must be known before it is computed again
            if not self._free_slots:
                return self._wait(sequence, "waits_slot", slots=self.config.max_num_seqs)
            num_new_tokens = self._num_new_tokens(sequence, plan.budget)
            if not num_new_tokens:
                return self._wait(sequence, "waits_budget", budget=self.config.max_num_batched_tokens)
            # The whole context must fit beside what the running ones still need for theirs: a prompt that is admitted
            # by its first chunk alone would soon be preempted again.
            promised = sum(self.kv.blocks_missing(other.sequence_id, other.num_tokens) for other in self.running)
            needed, free = self.kv.blocks_for(sequence.num_tokens), self.kv.num_free_blocks - promised
            if needed > free:
                return self._wait(sequence, "waits_blocks", needed=needed, free=max(0, free))
            block_ids = self.kv.allocate(sequence.sequence_id, num_new_tokens)
            assert block_ids is not None, "the blocks were counted above"
            self._admit(sequence, num_new_tokens, block_ids, plan)
        return None

    def _admit(self, sequence: Sequence, num_new_tokens: int, block_ids: list[int], plan: StepPlan) -> None:
        self.waiting.remove(sequence)
        sequence.slot = heapq.heappop(self._free_slots)
        sequence.status = Status.RUNNING
        bisect.insort(self.running, sequence, key=lambda other: other.sequence_id)
        if sequence.request.metrics.first_scheduled_time is None:
            sequence.request.metrics.first_scheduled_time = self._clock()
        self._decide(
            sequence,
            "resumed" if sequence.num_preemptions else "admitted",
            slot=sequence.slot,
            new=num_new_tokens,
            total=sequence.num_tokens,
            blocks=len(block_ids),
        )
        plan.admit(sequence)
        self._add(sequence, num_new_tokens, block_ids, plan)

    def _add(self, sequence: Sequence, num_new_tokens: int, block_ids: list[int], plan: StepPlan) -> None:
        prefill = num_new_tokens > 1 or sequence.num_computed_tokens == 0
        plan.add(sequence, num_new_tokens, block_ids)
        if left := sequence.num_tokens - sequence.num_computed_tokens - sequence.num_tokens_in_flight:
            self._decide(sequence, "chunked", new=num_new_tokens, left=left)
        elif prefill and self.config.enable_kv_cache:
            self._decide(sequence, "decoding")

    def _restart(self, sequence: Sequence, plan: StepPlan) -> None:
        """Forget that anything is cached: the naive way computes the whole context again in each step."""
        assert sequence.slot is not None
        sequence.num_computed_tokens = 0
        plan.restarted.append(sequence.slot)

    # ------------------------------------------------------------------ giving slots and blocks back

    def _force_preemptions(self, plan: StepPlan) -> None:
        for request_id, mode in self._forced.pop(plan.step, ()):
            for sequence in tuple(self.running):
                if sequence.request.request_id == request_id and not self._ending(sequence):
                    self._preempt(sequence, plan, cause=f"asked for by preempt_at({plan.step})", mode=mode)

    def _preempt(self, sequence: Sequence, plan: StepPlan, cause: str, mode: str = "recompute") -> None:
        """Take a sequence's slot and blocks; it waits with its tokens, in its old place in the queue.

        A token in flight is kept: it arrives with its step's update, and is not drawn again.
        """
        block_ids = tuple(self._release(sequence))
        sequence.status = Status.WAITING
        sequence.num_computed_tokens = 0
        sequence.num_preemptions += 1
        sequence.request.metrics.num_preemptions += 1
        self.waiting.push(sequence)
        plan.preempted.append(Preemption(sequence.sequence_id, mode, block_ids))
        self._decide(sequence, "preempted", mode=mode, tokens=sequence.num_tokens, cause=cause, blocks=len(block_ids))

    def _exhaust(self, sequence: Sequence, plan: StepPlan) -> None:
        """End a sequence that has the pool for itself and still needs more."""
        self._decide(sequence, "exhausted", tokens=sequence.num_tokens, pool=self.kv.num_blocks)
        sequence.stop_reason = f"the KV cache of {self.kv.num_blocks} blocks is full"
        plan.exhausted.append(self._finish(sequence, "length"))

    def _release(self, sequence: Sequence) -> list[int]:
        self.running.remove(sequence)
        assert sequence.slot is not None
        heapq.heappush(self._free_slots, sequence.slot)
        sequence.slot = None
        return self.kv.free(sequence.sequence_id)

    def _finish(self, sequence: Sequence, reason: FinishReason) -> Finish:
        block_ids: list[int] = []
        if sequence.status is Status.RUNNING:
            block_ids = self._release(sequence)
        else:
            self.waiting.remove(sequence)
        sequence.status = Status.FINISHED
        sequence.finish_reason = reason
        del self.sequences[sequence.sequence_id]
        if sequence.request.finished:
            sequence.request.metrics.finished_time = self._clock()
        self._decide(sequence, "finished", tokens=len(sequence.output_token_ids), reason=reason)
        return Finish(sequence.sequence_id, reason, tuple(block_ids))

    # ------------------------------------------------------------------ learning what a step drew

    def update(self, scheduler_output: SchedulerOutput, runner_output: ModelRunnerOutput) -> StepUpdate:
        """Take in what a step drew: append ids, stop, free. All counting was done when the step was planned."""
        update = StepUpdate(token_ids=[])
        self._deciding_step = scheduler_output.step
        for sequence_id, token_id in zip(scheduler_output.batch.sequence_ids, runner_output.token_ids, strict=True):
            sequence = self.sequences.get(sequence_id)
            if token_id == NO_TOKEN or sequence is None:
                # Nothing drawn, or drawn for a sequence that turned out to have ended a step earlier: discarded.
                update.token_ids.append(NO_TOKEN)
                continue
            sequence.num_tokens_in_flight -= 1
            update.advanced.append(sequence)
            if token_id == BAD_LOGITS:
                update.token_ids.append(NO_TOKEN)
                sequence.stop_reason = f"the model's logits at position {len(sequence.token_ids)} are not numbers"
                update.finished.append(self._finish(sequence, "error"))
                continue
            update.token_ids.append(token_id)
            self._append(sequence, token_id)
            if (reason := self._stop(sequence, token_id)) is not None:
                update.finished.append(self._finish(sequence, reason))
        update.decisions, self._decisions = self._decisions, []
        self._deciding_step = self.step
        return update

    def _append(self, sequence: Sequence, token_id: int) -> None:
        now = self._clock()
        sequence.token_ids.append(token_id)
        sequence.token_times.append(now)
        if sequence.request.metrics.first_token_time is None:
            sequence.request.metrics.first_token_time = now

    def _stop(self, sequence: Sequence, token_id: int) -> FinishReason | None:
        """Why a sequence ends with the token that it just took; None if it goes on."""
        params = sequence.request.params
        if token_id in self._eos_token_ids and not params.ignore_eos:
            return "stop"
        if token_id in params.stop_token_ids:
            sequence.stop_reason = token_id
            return "stop"
        if len(sequence.token_ids) - sequence.num_prompt_tokens >= sequence.request.max_tokens:
            return "length"
        return None

    # ------------------------------------------------------------------ saying why

    def _wait(self, sequence: Sequence, kind: str, **numbers: int) -> None:
        """Record why the head of the queue waits, when the reason is a new one."""
        if self._last_wait != (sequence.sequence_id, kind):
            self._last_wait = (sequence.sequence_id, kind)
            self._decide(sequence, kind, **numbers)

    def _decide(self, sequence: Sequence, kind: str, **numbers: int | str) -> None:
        decision = Decision(self._deciding_step, self._clock(), sequence.sequence_id, kind, numbers)
        sequence.request.decisions.append(decision)
        self._decisions.append(decision)
