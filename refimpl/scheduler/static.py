"""The baseline before continuous batching: a batch is filled once, and runs until all of it has ended.

Orca (Yu et al. 2022), section 2, calls it request-level scheduling. A sequence that ends early leaves its row in the batch:
it is computed on and on, and what it draws is thrown away. Its memory stays taken too, and nobody that waits comes in.
"""

from __future__ import annotations

from typing import Any

from refimpl.cache.kv_cache_manager import Allocation
from refimpl.outputs import Finish, ModelRunnerOutput, SchedulerOutput
from refimpl.request import FinishReason, Request, Sequence, Status
from refimpl.scheduler.plan import StepPlan, StepUpdate
from refimpl.scheduler.scheduler import Scheduler


class StaticScheduler(Scheduler):
    """Batches of at most ``max_num_seqs``: who waits when nothing runs, as far as blocks allow.

    With ``drop_finished`` rows that have ended are not computed further; nobody takes their place all the same. A row that
    is computed on gives its blocks up as soon as one that still runs needs them.
    """

    def __init__(self, *args: Any, drop_finished: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._drop_finished = drop_finished
        self._batch: set[int] = set()
        """The sequences of this batch, by id."""
        self._padding: list[Sequence] = []
        """Rows of the batch whose sequences have ended."""

    def update(self, scheduler_output: SchedulerOutput, runner_output: ModelRunnerOutput) -> StepUpdate:
        """As the continuous scheduler; with the last sequence of a batch, the padding leaves too."""
        update = super().update(scheduler_output, runner_output)
        update.finished += self._close_batch()
        update.decisions += self._log.take()
        return update

    def abort(self, request: Request, reason: FinishReason = "abort") -> None:
        """End a request's samples, wherever they are. Blocks come back at once; those of padding, with its batch."""
        super().abort(request, reason)
        self._aborted += self._close_batch()

    @property
    def _batch_is_over(self) -> bool:
        alive = len(self.running) > len(self._padding)
        return not alive and not any(sequence_id in self.sequences for sequence_id in self._batch)

    def _close_batch(self) -> list[Finish]:
        return [self._leave(self._padding[-1]) for _ in tuple(self._padding)] if self._batch_is_over else []

    def _make_way(self, plan: StepPlan) -> None:
        """Nothing that waits interrupts a batch; padding gives way to a sequence of it that was preempted."""
        head = self.waiting.head_of(self._batch)
        while self._padding and head is not None and not self._fits(head):
            plan.exhausted.append(self._leave(self._padding[-1]))

    def _continue_running(self, plan: StepPlan) -> None:
        """A row for each sequence that runs; then, one token longer each time, for each that has ended."""
        super()._continue_running(plan)
        for sequence in tuple(self._padding):
            computed = sequence.num_computed_tokens
            num_new_tokens = 1 if self.config.enable_kv_cache else computed + 1
            if num_new_tokens > plan.budget or computed + 1 >= self.config.max_model_len:
                continue  # a token more would stand beyond the longest context
            if (allocation := self._allocate(sequence, num_new_tokens)) is None:
                plan.exhausted.append(self._leave(sequence))
                continue
            if not self.config.enable_kv_cache:
                self._restart(sequence, plan)
            plan.add(sequence, num_new_tokens, allocation)

    def _make_room(self, sequence: Sequence, num_new_tokens: int, plan: StepPlan) -> Allocation | None:
        """Padding gives way before anything that still runs does."""
        while self._padding:
            if (allocation := self._allocate(sequence, num_new_tokens)) is not None:
                return allocation
            plan.exhausted.append(self._leave(self._padding[-1]))
        return super()._make_room(sequence, num_new_tokens, plan)

    def _admit_waiting(self, plan: StepPlan) -> None:
        if self._batch_is_over:
            self._batch = {sequence.sequence_id for sequence in self.waiting.first(self.config.max_num_seqs)}
        super()._admit_waiting(plan)
        if not plan.admitted:  # who found no room by now is for the next batch
            came = {sequence.sequence_id for sequence in self.running} | {
                sequence_id for sequence_id in self._batch if (s := self.sequences.get(sequence_id)) and s.num_preemptions
            }
            self._batch &= came

    def _next_to_admit(self) -> Sequence | None:
        if (member := self.waiting.head_of(self._batch)) is not None:
            return member
        if (head := self.waiting.head()) is not None:
            self._log.wait(head, "waits_batch", running=len(self.running) - len(self._padding))
        return None

    def _finish(self, sequence: Sequence, reason: FinishReason) -> Finish:
        if self._drop_finished or sequence.status is not Status.RUNNING or reason not in ("stop", "length"):
            return super()._finish(sequence, reason)
        self._padding.append(sequence)
        return self._end(sequence, reason, [], stays=True)

    def _leave(self, sequence: Sequence) -> Finish:
        """A row that was computed on leaves the batch, with its blocks."""
        self._padding.remove(sequence)
        wasted = sequence.num_computed_tokens - len(sequence.token_ids) + 1
        self._log.add(sequence, "left_batch", tokens=max(0, wasted))
        block_ids = self._release(sequence)
        assert sequence.finish_reason is not None
        return Finish(sequence.sequence_id, sequence.finish_reason, tuple(block_ids))
