"""Lifecycle: sequences come, take a slot, give it back, and end; with every change the blocks follow."""

from __future__ import annotations

from collections.abc import Callable

from refimpl.cache.auditor import Snapshot
from refimpl.cache.kv_cache_manager import KVCacheManager
from refimpl.config import SchedulerConfig
from refimpl.memory_report import CacheUsage
from refimpl.outputs import Arrival, Finish, Preemption
from refimpl.request import FinishReason, Request, Sequence, Status
from refimpl.scheduler.decisions import DecisionLog
from refimpl.scheduler.limits import check_fits, check_queue
from refimpl.scheduler.plan import StepPlan
from refimpl.scheduler.policies import FirstComeFirstServed, Policy
from refimpl.scheduler.preemption import PreemptionCosts, choose_mode, key_of
from refimpl.scheduler.request_queue import RequestQueue
from refimpl.scheduler.running_set import RunningSet
from refimpl.scheduler.stopping import NoText, TextWatch


class Lifecycle:
    """Who waits, who runs, and what happened since the last step. The scheduler, which is one, decides when."""

    def __init__(
        self,
        config: SchedulerConfig,
        kv_cache_manager: KVCacheManager,
        clock: Callable[[], float],
        policy: Policy | None,
        text: TextWatch | None,
        costs: PreemptionCosts | None = None,
    ) -> None:
        self.config = config
        self.costs = costs
        self.policy: Policy = policy or FirstComeFirstServed()
        self.kv = kv_cache_manager
        self.waiting = RequestQueue(lambda sequence: key_of(sequence, self.policy), self.policy.dynamic)
        self.can_share = config.enable_kv_cache and kv_cache_manager.can_share
        """Whether samples of one prompt and forks share blocks; otherwise each computes its own."""
        self.running = RunningSet(config.max_num_seqs)
        self.sequences: dict[int, Sequence] = {}
        """All that have not ended, by id."""
        self._clock = clock
        self._text: TextWatch = text or NoText()
        self._log = DecisionLog(clock)
        self._arrived: list[Arrival] = []
        self._aborted: list[Finish] = []
        self._exhausted: list[Sequence] = []
        self._dropped: list[Preemption] = []
        """Swapped sequences that lost their blocks since the last step, of which the log must be told."""
        self._forked: list[tuple[Sequence, Sequence, tuple[int, ...]]] = []
        """(parent, child, blocks shared): forks since the last step, of which the executor must be told."""

    def add(self, request: Request) -> None:
        """Put a request's samples into the queue.

        Raises:
            PromptError: it could never run, even alone.
            QueueFullError: ``max_num_queued_reqs`` samples wait already.
            PolicyError: the policy cannot say when its turn is.

        """
        check_fits(request, self.config, self.kv)
        check_queue(request, self.config, len(self.waiting))
        ahead = self._queue_up(request)
        self._arrived.append(
            Arrival(
                request.request_id,
                tuple(sequence.sequence_id for sequence in request.sequences),
                tuple(request.prompt_token_ids),
            )
        )
        most = request.max_tokens
        for sequence in request.sequences:
            self._log.add(sequence, "arrived", prompt=sequence.num_prompt_tokens, max_tokens=most, ahead=ahead)
            self.sequences[sequence.sequence_id] = sequence
            ahead += self._waits_itself(sequence)

    def _waits_itself(self, sequence: Sequence) -> bool:
        """Whether a new sequence queues; the others join when the prompt that they share is computed."""
        return sequence.leader is None or not self.can_share

    def _queue_up(self, request: Request) -> int:
        """Put a request's samples into the queue, or none; how many waited before."""
        before, pushed = len(self.waiting), list[Sequence]()
        try:
            for sequence in filter(self._waits_itself, request.sequences):
                self.waiting.push(sequence)
                pushed.append(sequence)
        except Exception:
            for sequence in pushed:
                self.waiting.remove(sequence)
            raise
        return before

    def fork(self, parent: Sequence, request: Request) -> None:
        """Add a request that goes on from where ``parent`` is, sharing its blocks; all tokens of the parent are known.

        Where the parent holds no blocks, or no slot is free, the new sequence waits in the queue like any other.

        Raises:
            PromptError: nothing fits behind the parent's tokens.
            PolicyError: the policy cannot say when its turn is.

        """
        assert not parent.num_tokens_in_flight, "the steps in flight were taken in"
        check_fits(request, self.config, self.kv)
        [child] = request.sequences
        try:
            self._join(parent, child)
        except Exception:
            self.kv.free(child.sequence_id)
            raise
        self._arrived.append(Arrival(request.request_id, (child.sequence_id,), tuple(request.prompt_token_ids)))
        self.sequences[child.sequence_id] = child

    def _join(self, parent: Sequence, child: Sequence) -> None:
        """Let a sequence that goes on from ``parent`` share its blocks, and take a slot; or wait, where that cannot be."""
        if parent.status is Status.RUNNING and not self.running.full and self.can_share and not child.reads_prompt:
            shared = self._share_blocks(parent, child)
            child.num_computed_tokens = parent.num_computed_tokens
            self._take_slot(child)
            self._forked.append((parent, child, shared))
            self._log.add(child, "forked", parent=parent.name, slot=child.slot or 0, blocks=len(shared))
        else:
            most, ahead = child.request.max_tokens, len(self.waiting)
            self.waiting.push(child)
            self._log.add(child, "arrived", prompt=len(child.token_ids), max_tokens=most, ahead=ahead)

    def _share_blocks(self, parent: Sequence, child: Sequence) -> tuple[int, ...]:
        """Give a child its parent's blocks. The last is no more the parent's own: its next decode may have to copy it."""
        parent.quiet_until = 0
        return self.kv.fork(parent.sequence_id, child.sequence_id)

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
        return bool(self._arrived or self._aborted or self._dropped or self.kv.was_reset)

    def usage(self) -> CacheUsage:
        """How the KV cache is used now."""
        return self.kv.usage(self._num_computed_tokens())

    def snapshot(self) -> Snapshot:
        """The cache's books, for the auditor."""
        return self.kv.snapshot(self._num_computed_tokens())

    def _num_computed_tokens(self) -> dict[int, int]:
        swapped = (self.sequences[sequence_id] for sequence_id in self.kv.swap.tables)
        return {sequence.sequence_id: sequence.num_computed_tokens for sequence in (*self.running, *swapped)}

    def take_exhausted(self) -> list[Sequence]:
        """The sequences that ended in planning, for want of blocks, since the last call."""
        taken, self._exhausted = self._exhausted, []
        return taken

    def _match_prefix(self, sequence: Sequence) -> list[int]:
        """Cached blocks that a sequence may begin with; none where all of the prompt must be computed, or it is swapped."""
        if not self.config.enable_kv_cache or sequence.reads_prompt or sequence.sequence_id in self.kv.swap:
            return []
        return self.kv.match_prefix(sequence.token_ids, sequence.request.cache_salt)

    def _needed_and_free(self, sequence: Sequence, cached_blocks: list[int]) -> tuple[int, int]:
        """Blocks that a waiting sequence needs, and those that are to be had.

        Its whole context must fit beside what the running ones still need for theirs: a prompt that is admitted by its
        first chunk alone would soon be preempted again.
        """
        promised = sum(self.kv.blocks_missing(other.sequence_id, other.num_tokens) for other in self.running)
        if sequence.sequence_id in self.kv.swap:
            needed = self.kv.blocks_to_resume(sequence.sequence_id, sequence.num_computed_tokens, sequence.num_tokens)
        else:
            needed = self.kv.blocks_for(sequence.num_tokens) - len(cached_blocks)
        return needed, self.kv.num_free_blocks_beside(cached_blocks) - promised - self._watermark()

    def _watermark(self) -> int:
        """Blocks that stay free at an admission, for those that run: without them, the newest would soon be preempted."""
        return self.kv.blocks_to_keep(self.config.watermark) if len(self.running) else 0

    def _wait_for_blocks(self, sequence: Sequence, needed: int, free: int) -> None:
        if kept := self._watermark():
            self._log.wait(sequence, "waits_watermark", needed=needed, free=free, kept=kept)
        else:
            self._log.wait(sequence, "waits_blocks", needed=needed, free=free)

    def _take_slot(self, sequence: Sequence) -> None:
        sequence.order = (key_of(sequence, self.policy), sequence.sequence_id)
        self.running.add(sequence)
        if sequence.request.metrics.first_scheduled_time is None:
            sequence.request.metrics.first_scheduled_time = self._clock()

    def _preempt(self, sequence: Sequence, plan: StepPlan, cause: str, mode: str | None = None) -> None:
        """Take a sequence's slot and blocks; it waits in its old place. A token in flight is kept, not drawn again.

        Its blocks go to the swap space if that is cheaper than computing them again, and has room. Those of a fork that no
        step has told of do not: a table which the log never showed cannot be followed to the host.
        """
        sequence.num_preemptions += 1
        self.waiting.push(sequence)  # first: the policy may raise
        untold = plan.withdraw(sequence)
        beams = sequence.request.beams
        if beams is not None and beams.pending.pop(sequence.sequence_id, ()):
            mode = "recompute"  # it has computed all its tokens, and must draw once more
        mode = mode or choose_mode(self.config.preemption_mode, self.costs, sequence.num_computed_tokens)
        if untold or sequence.num_tokens_in_flight > 1:  # drafts whose check is not known: how much is computed is not
            mode = "recompute"
        swapped = self.kv.swap_out(sequence.sequence_id) if mode == "swap" else None
        if swapped is not None:
            self.running.remove(sequence)
            plan.swapped_out += swapped.transfers
            block_ids = tuple(swapped.released)
        else:
            mode, block_ids = "recompute", tuple(self._release(sequence))
            sequence.num_computed_tokens = 0
        sequence.status = Status.WAITING
        sequence.quiet_until = 0
        sequence.request.metrics.num_preemptions += 1
        plan.preempted.append(Preemption(sequence.sequence_id, mode, block_ids))
        self._log.add(sequence, "preempted", mode=mode, tokens=sequence.num_tokens, cause=cause, blocks=len(block_ids))

    def _drop_held(self, plan: StepPlan, but: Sequence | None = None) -> bool:
        """Take the device blocks that the last swapped sequence holds; it is to be recomputed. False if none holds any.

        For when nothing else is left to give way: what is held may never keep the others from going on.
        """
        for sequence_id in reversed(self.kv.swap.holders):
            if but is None or sequence_id != but.sequence_id:
                self._drop_held_by(self.sequences[sequence_id], plan)
                return True
        return False

    def _drop_held_by(self, sequence: Sequence, plan: StepPlan) -> None:
        """Take what a swapped sequence holds, on the device and on the host; it is to be recomputed."""
        block_ids = self._drop_swapped(sequence)
        plan.preempted.append(Preemption(sequence.sequence_id, "recompute", tuple(block_ids)))
        self._log.add(sequence, "dropped_swap", blocks=len(block_ids))

    def drop_all_swapped(self) -> None:
        """After a step that failed: what it moved may hold nothing, so all that is swapped is to be recomputed."""
        for sequence_id in self.kv.swap.tables:
            block_ids = self._drop_swapped(self.sequences[sequence_id])
            self._dropped.append(Preemption(sequence_id, "recompute", tuple(block_ids)))

    def _drop_swapped(self, sequence: Sequence) -> list[int]:
        sequence.num_computed_tokens = 0
        return self.kv.drop_swapped(sequence.sequence_id)

    def _exhaust(self, sequence: Sequence, plan: StepPlan) -> None:
        """End a sequence that has the pool for itself and still needs more."""
        self._log.add(sequence, "exhausted", tokens=sequence.num_tokens, pool=self.kv.num_blocks)
        sequence.stop_reason = f"the KV cache of {self.kv.num_blocks} blocks is full"
        plan.exhausted.append(self._finish(sequence, "length"))
        self._exhausted.append(sequence)

    def _release(self, sequence: Sequence) -> list[int]:
        self.running.remove(sequence)
        return self.kv.free(sequence.sequence_id)

    def _finish(self, sequence: Sequence, reason: FinishReason) -> Finish:
        """End a sequence wherever it is; its blocks and its slot come back."""
        block_ids: list[int] = []
        if sequence.status is Status.RUNNING:
            block_ids = self._release(sequence)
        elif self.waiting.waits(sequence):
            self.waiting.remove(sequence)
            block_ids = self.kv.drop_swapped(sequence.sequence_id)
        else:  # it waits for the prompt that it shares; or planning failed as it was to take a slot
            block_ids = self.kv.free(sequence.sequence_id)
        return self._end(sequence, reason, block_ids)

    def _end(self, sequence: Sequence, reason: FinishReason, block_ids: list[int], stays: bool = False) -> Finish:
        """Say that nothing more comes of a sequence. The text that was held back to its end may hold a stop string."""
        found = self._text.finish(sequence) if reason in ("stop", "length") and sequence.request.params.stop else None
        if found is not None:
            sequence.stop_reason, reason = found, "stop"
            self._log.add(sequence, "stop_string", stop=found)
        sequence.status = Status.FINISHED
        sequence.quiet_until = 0
        sequence.finish_reason = reason
        del self.sequences[sequence.sequence_id]
        if sequence.request.finished:
            sequence.request.metrics.finished_time = self._clock()
        self._log.add(sequence, "finished", tokens=len(sequence.output_token_ids), reason=reason)
        return Finish(sequence.sequence_id, reason, tuple(block_ids), stays)
