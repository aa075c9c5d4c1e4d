"""Beams: a request whose sequences are the beams of one search. They draw in lockstep, then fork and end together.

A beam's row draws nothing by itself: it sends its most probable next tokens, and pauses. When every beam of the request has
sent its own, the search says which go on with which tokens (:mod:`refimpl.beam_group`). A beam that nothing goes on from
ends. One that goes on takes its token; for each further continuation of it a new sequence forks off, and shares all blocks
until one of the two writes. So a step of the search copies no block but a last, half full one.
"""

from __future__ import annotations

from typing import Any

from refimpl.beam_group import BeamGroup
from refimpl.outputs import Finish
from refimpl.request import Request, Sequence, Status
from refimpl.row_extras import RowExtras
from refimpl.scheduler.lifecycle import Lifecycle
from refimpl.scheduler.plan import StepPlan, StepUpdate


class BeamLifecycle(Lifecycle):
    """What a scheduler does for requests that are beam searches."""

    def __init__(self, *args: Any, eos_token_ids: frozenset[int] = frozenset()) -> None:
        super().__init__(*args)
        self._eos_token_ids = eos_token_ids
        self._continued: list[Sequence] = []
        """Beams that took a token since the last plan: the executor has another one in its place."""
        self._given_up: list[Request] = []
        """Searches that the cache is too small for."""
        self._born: list[tuple[int, int]] = []
        """(beam, beam that forked off it) since the last plan."""

    def _propose(self, beam: Sequence, extras: RowExtras | None, update: StepUpdate) -> None:
        """A beam's row came back. The last one of its request to do so moves the search on."""
        group = beam.request.beams
        top = extras.logprobs[-1] if extras is not None and extras.logprobs else None
        assert group is not None
        assert top is not None
        group.pending[beam.sequence_id] = tuple(zip(top.top_ids, top.top_logprobs, strict=True))
        if all(other.sequence_id in group.pending for other in beam.request.sequences):
            self._move_on(beam.request, group, update)

    def _move_on(self, request: Request, group: BeamGroup, update: StepUpdate) -> None:
        beams = request.sequences
        following = group.advance([group.pending.pop(beam.sequence_id) for beam in beams])
        group.times.append(self._clock())
        if group.done:
            update.finished += self._conclude(request, group)
            update.advanced += request.sequences
            return
        heirs = {continuation.beam for continuation in following}
        for index, beam in enumerate(beams):
            if index not in heirs:
                update.finished.append(self._finish(beam, "pruned"))
        request.sequences = []
        for continuation in following:  # all forks before any token: a fork shares what was computed without it
            beam = beams[continuation.beam]
            request.sequences.append(self._fork_beam(beam, group) if beam in request.sequences else beam)
        for beam, continuation in zip(request.sequences, following, strict=True):
            beam.token_ids.append(continuation.token_id)
            beam.token_times.append(group.times[-1])
            if beam in beams:  # a fork is told of with its token
                self._continued.append(beam)
            update.chosen.append((beam.sequence_id, continuation.token_id))
        update.beams.append(tuple(beam.sequence_id for beam in request.sequences))

    def _fork_beam(self, parent: Sequence, group: BeamGroup) -> Sequence:
        number = group.take_number()
        child = Sequence(
            sequence_id=group.first_sequence_id + number,
            request=parent.request,
            index=number,
            token_ids=list(parent.token_ids),
            num_prompt_tokens=parent.num_prompt_tokens,
            path=parent.path,
        )
        child.token_times = list(parent.token_times)
        child.decisions.extend(parent.decisions)  # its story too, up to here
        self.sequences[child.sequence_id] = child
        self._born.append((parent.sequence_id, child.sequence_id))
        self._join(parent, child)
        return child

    def _conclude(self, request: Request, group: BeamGroup) -> list[Finish]:
        """End the beams; from here on the request's sequences are the finished hypotheses, best first."""
        beams = request.sequences
        request.sequences = []
        for rank, hypothesis in enumerate(group.finished):
            number = group.take_number()
            sequence = Sequence(
                sequence_id=group.first_sequence_id + number,
                request=request,
                index=rank,
                token_ids=[*request.prompt_token_ids, *hypothesis.token_ids],
                num_prompt_tokens=len(request.prompt_token_ids),
                path=beams[0].path,
                status=Status.FINISHED,
                finish_reason=hypothesis.reason,
                hypothesis=hypothesis,
            )
            sequence.decisions.extend(beams[0].decisions)
            sequence.token_times = group.times[: len(hypothesis.token_ids)]
            self._say(sequence, group)
            request.sequences.append(sequence)
        request.metrics.first_token_time = group.times[0] if group.times else None
        return [self._finish(beam, "pruned") for beam in beams]

    def _say(self, sequence: Sequence, group: BeamGroup) -> None:
        """Make a hypothesis's text, and say which stop id or string ended it, as for any sample."""
        params = sequence.request.params
        for token_id in sequence.output_token_ids:
            by_id = token_id in group.endings.stop_ids
            self._text.append(sequence, token_id, silent=by_id and not params.include_stop_str_in_output)
        last = sequence.token_ids[-1]
        if (found := self._text.finish(sequence)) is not None:
            sequence.finish_reason, sequence.stop_reason = "stop", found
        elif (
            sequence.finish_reason == "stop"
            and last in params.stop_token_ids
            and (params.ignore_eos or last not in self._eos_token_ids)
        ):
            sequence.stop_reason = last

    def _at_barrier(self, sequence: Sequence) -> bool:
        """Whether it is a beam that waits for the others of its search."""
        return sequence.request.beams is not None and sequence.sequence_id in sequence.request.beams.pending

    def _forget_proposals(self, beam: Sequence, plan: StepPlan) -> bool:
        """A beam gave way with a token in flight, has proposed since, and waits to go on. Whether it is to draw again.

        While others of its search are about to propose, it waits for them. Else those that have not proposed wait behind
        it, perhaps for ever: it forgets what it proposed, and goes first.
        """
        group = beam.request.beams
        assert group is not None
        silent = [other for other in beam.request.sequences if other.sequence_id not in group.pending]
        if any(other.status is Status.RUNNING or other.num_tokens_in_flight for other in silent):
            return False
        del group.pending[beam.sequence_id]
        if beam.sequence_id in self.kv.swap:  # with all of its tokens computed: nothing would be left to draw from
            self._drop_held_by(beam, plan)
        return True

    def _end_given_up(self, plan: StepPlan) -> None:
        """End searches that the cache is too small for, once none of their rows is outstanding."""
        for request in tuple(self._given_up):
            if any(beam.num_tokens_in_flight for beam in request.sequences):
                continue
            self._given_up.remove(request)
            group = request.beams
            if group is not None and not request.finished:
                group.give_up()
                plan.exhausted += self._conclude(request, group)
                for sequence in request.sequences:
                    sequence.stop_reason = f"the KV cache of {self.kv.num_blocks} blocks is too small for the beams"
                self._exhausted += request.sequences

    def _break_standstill(self, plan: StepPlan) -> None:
        """Nothing was planned, and all that run are beams that wait for others which find no room.

        Where all are of one search, the cache is too small for it. Else the last one gives way.
        """
        head = self.waiting.head()
        if plan.sequence_ids or plan.preempted or head is None or not all(map(self._at_barrier, self.running)):
            return
        running = list(self.running)
        if not running:
            return
        if all(beam.request is head.request for beam in running):
            if not self._drop_held(plan):
                self._give_up(head.request)
        else:
            self._preempt(running[-1], plan, cause="its search waits for beams that find no room")

    def _give_up(self, request: Request) -> None:
        """The cache is too small for a search: it ends as soon as none of its rows is outstanding."""
        if request not in self._given_up:
            self._given_up.append(request)
