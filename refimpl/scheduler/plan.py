"""StepPlan: one step while it is being planned. ``Scheduler.schedule`` fills it; ``freeze`` makes the record."""

from __future__ import annotations

from refimpl.outputs import Admission, Arrival, Batch, Decision, Finish, NewBlocks, Preemption, SchedulerOutput
from refimpl.request import Sequence

EMPTY_BATCH = Batch(version=0, sequence_ids=(), slots=(), num_new_tokens=())


class StepPlan:
    """The rows chosen so far, what is left of the budget, and the changes that the executor will be told."""

    def __init__(self, step: int, budget: int) -> None:
        self.step = step
        self.budget = budget
        self.sequence_ids: list[int] = []
        self.slots: list[int] = []
        self.num_new_tokens: list[int] = []
        self.admitted: list[Admission] = []
        self.restarted: list[int] = []
        self.new_blocks: list[NewBlocks] = []
        self.preempted: list[Preemption] = []
        self.exhausted: list[Finish] = []

    def add(self, sequence: Sequence, num_new_tokens: int, block_ids: list[int]) -> None:
        """Give a running sequence a row, and order its tokens: from here on they count as computed.

        A row that catches up with its sequence's last token also orders a new one, whose id comes with the update.
        """
        assert sequence.slot is not None
        self.sequence_ids.append(sequence.sequence_id)
        self.slots.append(sequence.slot)
        self.num_new_tokens.append(num_new_tokens)
        self.budget -= num_new_tokens
        if block_ids:
            self.new_blocks.append(NewBlocks(sequence.slot, tuple(block_ids)))
        sequence.num_computed_tokens += num_new_tokens
        if sequence.num_computed_tokens == sequence.num_tokens:
            sequence.num_tokens_in_flight += 1

    def admit(self, sequence: Sequence) -> None:
        """Tell the executor all that it must know of a sequence that takes a slot."""
        assert sequence.slot is not None
        params = sequence.request.params
        self.admitted.append(
            Admission(
                slot=sequence.slot,
                sequence_id=sequence.sequence_id,
                token_ids=tuple(sequence.token_ids),
                num_computed_tokens=sequence.num_computed_tokens,
                temperature=params.temperature,
                top_p=params.top_p,
                top_k=params.top_k,
                min_p=params.min_p,
                seed=sequence.request.seed,
                path=sequence.path,
            )
        )

    def freeze(
        self, last: Batch, arrived: list[Arrival], aborted: list[Finish], decisions: list[Decision]
    ) -> SchedulerOutput:
        """The finished record. It holds the ``last`` step's batch itself if the rows are the same."""
        rows = (tuple(self.sequence_ids), tuple(self.slots), tuple(self.num_new_tokens))
        same = rows == (last.sequence_ids, last.slots, last.num_new_tokens)
        return SchedulerOutput(
            step=self.step,
            batch=last if same else Batch(last.version + 1, *rows),
            admitted=tuple(self.admitted),
            restarted=tuple(self.restarted),
            new_blocks=tuple(self.new_blocks),
            arrived=tuple(arrived),
            aborted=tuple(aborted),
            preempted=tuple(self.preempted),
            exhausted=tuple(self.exhausted),
            decisions=tuple(decisions),
        )
