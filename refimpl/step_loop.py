"""StepLoop: plan a step, submit it, take in the oldest one outstanding. One loop, with a queue of depth 0 or 1."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future

import msgspec

from refimpl.executor.executor import Executor
from refimpl.outputs import NO_TOKEN, ModelRunnerOutput, SchedulerOutput
from refimpl.recorder import PlanTime, Recorder
from refimpl.request import Sequence, Status
from refimpl.scheduler import Scheduler, StepUpdate
from refimpl.step_pace import StepPace

log = logging.getLogger(__name__)

STEP_FAILED = "the step failed"
"""How the ``stop_reason`` of a sequence begins that ended because its step could not be computed."""


class _InFlight(msgspec.Struct, frozen=True, gc=False):
    """A step that was submitted and whose tokens are not taken in yet."""

    scheduler_output: SchedulerOutput
    future: Future[ModelRunnerOutput]
    planned: PlanTime


class StepLoop:
    """Drives a scheduler and an executor. With ``depth`` 1 a step is planned before the last one's tokens are known.

    What steps bring is kept as news until somebody takes it, so an interrupt loses nothing.
    """

    def __init__(self, scheduler: Scheduler, executor: Executor, recorder: Recorder, depth: int) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.recorder = recorder
        self.depth = depth
        self.pace = StepPace()
        """Says how long planning the next step can wait."""
        self._in_flight: deque[_InFlight] = deque()
        self._news: list[Sequence] = []

    @property
    def busy(self) -> bool:
        """Whether steps are in flight, or news wait to be taken."""
        return bool(self._in_flight or self._news)

    def take_news(self) -> list[Sequence]:
        """The sequences that took a token or ended since the last call."""
        news, self._news = self._news, []
        return news

    def step(self) -> None:
        """Schedule, submit, take in.

        Raises:
            PolicyError: the policy gave an answer that cannot be followed; what ran ends with an error.

        """
        began = time.perf_counter()
        try:
            scheduler_output = self.scheduler.schedule()
        except Exception as error:  # rows that were planned before it are counted as computed, and never will be
            self.drain()
            self._end_running((), error)
            raise
        planned = self.recorder.plan_time(self.scheduler)
        self._news += self.scheduler.take_exhausted()
        if scheduler_output.empty:
            self._take_in_oldest()  # first: the log is in the order of steps
            self.recorder.record(scheduler_output, StepUpdate([]), planned)
        else:
            future = self.executor.submit(scheduler_output)
            self._in_flight.append(_InFlight(scheduler_output, future, planned))
            self.pace.ordered(began, scheduler_output.batch)
            if len(self._in_flight) <= self.depth:
                return
            self._take_in_oldest()
        self.drain_if_idle()

    def drain(self) -> bool:
        """Take in every step in flight, so that all tokens are known here; whether there were any."""
        found = bool(self._in_flight)
        while self._in_flight:
            self._take_in_oldest()
        return found

    def tell_news(self) -> None:
        """Record what happened since the last step when no further step will."""
        if self.scheduler.has_news:
            self.recorder.record(self.scheduler.schedule(), StepUpdate([]), self.recorder.plan_time(self.scheduler))

    def drain_if_idle(self) -> None:
        """Take in a step that was submitted before its only sequences turned out to have ended: all of it is discarded."""
        if not self.scheduler.has_unfinished:
            self.drain()

    def _take_in_oldest(self) -> None:
        if not self._in_flight:
            return
        oldest = self._in_flight.popleft()
        try:
            runner_output = oldest.future.result()
        except Exception as error:
            self.pace.came_back()
            self._fail(oldest, error)
            return
        except BaseException as error:  # Ctrl-C: either this wait was interrupted, or the step itself
            if oldest.future.done():
                self.pace.came_back()
                self._fail(oldest, error)
            else:
                self._in_flight.appendleft(oldest)
            raise
        self.pace.came_back()
        try:
            update = self.scheduler.update(oldest.scheduler_output, runner_output)
        except Exception as error:
            self._fail(oldest, error)
            raise
        self._news += update.advanced
        self.recorder.record(oldest.scheduler_output, update, oldest.planned)

    def _lost(self) -> list[Sequence]:
        """Sequences that nobody would think of again: they were on their way from queue to slot when planning failed."""
        waits, slot = self.scheduler.waiting.waits, Status.RUNNING
        return [
            sequence
            for sequence in self.scheduler.sequences.values()
            if not any(waits(one) or one.status is slot for one in sequence.request.sequences)
        ]

    def _fail(self, step: _InFlight, error: BaseException) -> None:
        """A step could not be computed: record it, and end what depends on it. Requests that only wait go on."""
        rows = step.scheduler_output.batch.sequence_ids
        self.recorder.record(step.scheduler_output, StepUpdate([NO_TOKEN] * len(rows)), step.planned)
        ended = self._end_running(rows, error)
        if ended:  # else only a token was computed that would have been discarded
            names = ", ".join(sequence.name for sequence in ended[:5]) + (", …" if len(ended) > 5 else "")
            if isinstance(error, Exception):
                log.error("step %d failed and ends %s", step.scheduler_output.step, names, exc_info=error)
            else:  # a second Ctrl-C: where it struck is of no use to anybody
                log.warning("step %d was interrupted in its midst, which ends %s", step.scheduler_output.step, names)

    def _end_running(self, rows: Iterable[int], error: BaseException) -> list[Sequence]:
        """End what runs, and the sequences of ``rows``, with an error: blocks that they share may hold nothing now.

        What the prefix cache was told of their blocks is taken back.
        """
        sequences = self.scheduler.sequences
        doomed = [*self.scheduler.running, *(sequences[row] for row in rows if row in sequences), *self._lost()]
        ended: list[Sequence] = []
        for request in dict.fromkeys(sequence.request for sequence in doomed):
            alive = [sequence for sequence in request.sequences if not sequence.finished]
            for sequence in alive:
                sequence.stop_reason = f"{STEP_FAILED}: {error!r}"
            self.scheduler.abort(request, "error")
            ended += alive
        self.scheduler.drop_all_swapped()
        self.scheduler.kv.reset_prefix_cache()
        self._news += ended
        return ended
