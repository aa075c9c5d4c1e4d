"""Taking in: what a step drew joins its sequences, which go on or end. The half of the scheduler behind the device."""

from __future__ import annotations

from typing import Any

import msgspec

from refimpl.outputs import NO_TOKEN, Batch, Check, ModelRunnerOutput, Refusal, SchedulerOutput
from refimpl.request import Sequence
from refimpl.row_extras import RowExtras
from refimpl.scheduler.beams import BeamLifecycle
from refimpl.scheduler.drafting import Drafting, stop_drafting
from refimpl.scheduler.plan import StepUpdate
from refimpl.scheduler.stopping import failure_of, stop

NO_DRAFTS = Check((), 0)


class TakesIn(BeamLifecycle):
    """What a scheduler does with the outcome of a step."""

    drafting: Drafting

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.step = 0
        """The number of the next step."""
        self._refused: list[Refusal] = []
        """What checks that became known since the last plan refused."""

    def update(self, scheduler_output: SchedulerOutput, runner_output: ModelRunnerOutput) -> StepUpdate:
        """Take in what a step drew: append ids, stop, free. All counting was done when the step was planned."""
        batch = scheduler_output.batch
        if batch.num_drafts:
            runner_output = self._cut_at_ends(batch, runner_output)
        extras, update = runner_output.extras, StepUpdate(token_ids=list(runner_output.token_ids))
        self._log.step = scheduler_output.step
        now = self._clock()
        if batch.num_drafts:
            self._take_checked(batch, runner_output, update, now)
        sequences = map(self.sequences.get, batch.sequence_ids)
        for row, (sequence, token_id) in enumerate(zip(sequences, runner_output.token_ids, strict=True)):
            plain = token_id >= 0 and row not in extras  # a beam's row sends back more than its token
            # Where the sequence turned out to have ended a step earlier, what was drawn for it is discarded.
            if sequence is None or not (plain or self._takes(sequence, token_id, extras.get(row), update)):
                update.token_ids[row] = NO_TOKEN
                continue
            sequence.num_tokens_in_flight -= 1
            self._append(sequence, token_id, now, update)
        update.decisions = self._log.take()
        self._log.step = self.step
        return update

    def _append(self, sequence: Sequence, token_id: int, now: float, update: StepUpdate) -> None:
        """A sequence takes a token, and may end with it."""
        sequence.token_ids.append(token_id)
        sequence.token_times.append(now)
        if sequence.request.metrics.first_token_time is None:
            sequence.request.metrics.first_token_time = now
        update.advanced.append(sequence)
        if (reason := stop(sequence, token_id, self._eos_token_ids, self._text)) is not None:
            update.finished.append(self._finish(sequence, reason))

    def _cut_at_ends(self, batch: Batch, runner_output: ModelRunnerOutput) -> ModelRunnerOutput:
        """Drafts may reach beyond what a request may say: a check ends there, its last token perhaps one of them."""
        token_ids, checks, extras = list(runner_output.token_ids), dict(runner_output.checks), dict(runner_output.extras)
        for row, check in runner_output.checks.items():
            sequence = self.sequences.get(batch.sequence_ids[row])
            room = len(check.drafts) if sequence is None else sequence.most_tokens - len(sequence.token_ids) - 1
            if room >= len(check.drafts):
                continue
            checks[row] = Check(check.drafts[:room], min(check.num_accepted, room))
            if check.num_accepted > room:
                token_ids[row] = check.drafts[room]
                if row in extras:
                    told = extras[row]
                    extras[row] = msgspec.structs.replace(told, logprobs=told.logprobs[: room + 1], failure=None)
        return msgspec.structs.replace(runner_output, token_ids=tuple(token_ids), checks=checks, extras=extras)

    def _take_checked(self, batch: Batch, runner_output: ModelRunnerOutput, update: StepUpdate, now: float) -> None:
        """The drafts of a step's rows: those accepted are taken, one by one, as far as their sequence goes on."""
        for row, num_planned in enumerate(batch.num_drafts):
            sequence = self.sequences.get(batch.sequence_ids[row])
            if sequence is None or not num_planned:
                continue
            check = runner_output.checks.get(row, NO_DRAFTS)
            refused = self.drafting.settle(sequence, num_planned, len(check.drafts), check.num_accepted)
            if refused:
                self._give_back(sequence, refused, update)
            if runner_output.draft_failure is not None:
                stop_drafting(sequence, self._log, runner_output.draft_failure)
            logprobs = runner_output.extras[row].logprobs if row in runner_output.extras else ()
            for number, token_id in enumerate(check.accepted):
                if sequence.finished:
                    check = Check(check.drafts, number)
                    break
                sequence.logprobs += logprobs[number : number + 1]
                self._append(sequence, token_id, now, update)
            sequence.request.metrics.num_drafts += len(check.drafts)
            sequence.request.metrics.num_accepted += check.num_accepted
            update.checks[row] = check

    def _give_back(self, sequence: Sequence, refused: int, update: StepUpdate) -> None:
        """A running sequence counts fewer tokens than were planned: the blocks behind them are free again."""
        assert sequence.slot is not None
        returned = self.kv.give_back(sequence.sequence_id, sequence.num_computed_tokens)
        self._refused.append(Refusal(sequence.slot, refused, len(returned)))
        if returned:
            update.returned.append((sequence.sequence_id, tuple(returned)))

    def _takes(self, sequence: Sequence, token_id: int, extras: RowExtras | None, update: StepUpdate) -> bool:
        """Keep what a row sends back beside its token, if that is a token. Whether its sequence takes the token."""
        if extras is not None:
            sequence.take(extras)
        failure, drew = failure_of(sequence, token_id, extras), token_id != NO_TOKEN
        if failure is None and drew and sequence.request.beams is None:
            if extras is not None:
                sequence.logprobs += extras.logprobs[-1:]
            return True
        sequence.num_tokens_in_flight -= drew
        if failure is not None:
            self._fail(sequence, failure, update)
        elif drew:
            self._propose(sequence, extras, update)
        return False

    def _fail(self, sequence: Sequence, reason: str, update: StepUpdate) -> None:
        """End a sequence that cannot go on; where that is its prompt's doing, with all samples of the prompt."""
        in_prompt = len(sequence.token_ids) == sequence.num_prompt_tokens
        all_of_them = in_prompt or sequence.request.beams is not None
        for one in sequence.request.sequences if all_of_them else [sequence]:
            if not one.finished:
                one.stop_reason = reason
                update.advanced.append(one)
                update.finished.append(self._finish(one, "error"))
