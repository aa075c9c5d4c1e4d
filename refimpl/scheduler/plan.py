"""StepPlan: one step while ``Scheduler.schedule`` plans it. StepUpdate: what ``Scheduler.update`` learns of it."""

from __future__ import annotations

import msgspec

from refimpl.cache.kv_cache_manager import NOTHING_NEW, Allocation
from refimpl.outputs import (
    Admission,
    Arrival,
    Batch,
    BlockCopy,
    CacheChanges,
    Check,
    Decision,
    Finish,
    NewBlocks,
    Preemption,
    PrefixHit,
    Refusal,
    SchedulerOutput,
)
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
        self.num_drafts: dict[int, int] = {}
        """By row, for those with drafts."""
        self.admitted: list[Admission] = []
        self.restarted: list[int] = []
        self.chosen: list[tuple[int, int]] = []
        self.swapped_out: list[tuple[int, int]] = []
        self.swapped_in: list[tuple[int, int]] = []
        self.new_blocks: list[NewBlocks] = []
        self.copies: list[BlockCopy] = []
        self.prefix_hits: list[PrefixHit] = []
        self.forks: list[tuple[int, int]] = []
        self.born: list[tuple[int, int]] = []
        """Forks of beams, told even where the child finds no slot: nothing else tells that it is there."""
        self.preempted: list[Preemption] = []
        self.exhausted: list[Finish] = []

    def add(self, sequence: Sequence, num_new_tokens: int, allocation: Allocation, num_drafts: int = 0) -> None:
        """Give a running sequence a row, and order its tokens: from here on they count as computed.

        A row that catches up with its sequence's last token also orders a new one, whose id comes with the update. So do
        drafts, which are the last of the row's tokens: all of them count, until the update says which were accepted.
        """
        slot = sequence.slot
        assert slot is not None
        if num_drafts:
            self.num_drafts[len(self.slots)] = num_drafts
            sequence.num_tokens_in_flight += num_drafts
        self.sequence_ids.append(sequence.sequence_id)
        self.slots.append(slot)
        self.num_new_tokens.append(num_new_tokens)
        self.budget -= num_new_tokens
        if allocation is not NOTHING_NEW:
            if allocation.new_blocks:
                self.new_blocks.append(NewBlocks(slot, tuple(allocation.new_blocks)))
            for index, source, target in allocation.copies:
                self.copies.append(BlockCopy(slot, index, source, target))
        computed = sequence.num_computed_tokens = sequence.num_computed_tokens + num_new_tokens
        if computed == len(sequence.token_ids) + sequence.num_tokens_in_flight:
            sequence.num_tokens_in_flight += 1

    def decode(self, sequence: Sequence) -> None:
        """Give a row to a sequence of which nothing else is to be planned (``Sequence.quiet_until``): most rows, by far."""
        assert sequence.slot is not None
        self.sequence_ids.append(sequence.sequence_id)
        self.slots.append(sequence.slot)
        self.num_new_tokens.append(1)
        self.budget -= 1
        sequence.num_computed_tokens += 1
        sequence.num_tokens_in_flight += 1

    def admit(self, sequence: Sequence, shared_blocks: tuple[int, ...] = ()) -> None:
        """Tell the executor all that it must know of a sequence that takes a slot.

        ``shared_blocks`` are the head of its table: cached ones, or those of the sequence that it was forked from.
        """
        assert sequence.slot is not None
        self.admitted.append(
            Admission(
                slot=sequence.slot,
                sequence_id=sequence.sequence_id,
                token_ids=tuple(sequence.token_ids),
                num_prompt_tokens=sequence.num_prompt_tokens,
                num_computed_tokens=sequence.num_computed_tokens,
                seed=sequence.request.seed,
                path=sequence.path,
                reads_from=0 if sequence.reads_prompt else sequence.num_prompt_tokens,
                sampling=sequence.request.sampling,
            )
        )
        if shared_blocks:
            self.new_blocks.append(NewBlocks(sequence.slot, shared_blocks))

    def withdraw(self, sequence: Sequence) -> bool:
        """Forget that a sequence was admitted in this step, if it was: a fork that gives way before its first row."""
        before = len(self.admitted)
        self.admitted = [admission for admission in self.admitted if admission.sequence_id != sequence.sequence_id]
        self.new_blocks = [blocks for blocks in self.new_blocks if blocks.slot != sequence.slot]
        self.forks = [(parent, child) for parent, child in self.forks if child != sequence.sequence_id]
        return len(self.admitted) < before

    def freeze(
        self,
        last: Batch,
        arrived: list[Arrival],
        aborted: list[Finish],
        cache_changes: CacheChanges,
        decisions: list[Decision],
        refused: list[Refusal],
    ) -> SchedulerOutput:
        """The finished record. It holds the ``last`` step's batch itself if the rows are the same."""
        drafts = tuple([self.num_drafts.get(row, 0) for row in range(len(self.slots))]) if self.num_drafts else ()
        rows = (tuple(self.sequence_ids), tuple(self.slots), tuple(self.num_new_tokens), drafts)
        same = rows == (last.sequence_ids, last.slots, last.num_new_tokens, last.num_drafts)
        return SchedulerOutput(
            step=self.step,
            batch=last if same else Batch(last.version + 1, *rows),
            refused=tuple(refused),
            admitted=tuple(self.admitted),
            restarted=tuple(self.restarted),
            chosen=tuple(self.chosen),
            swapped_out=tuple(self.swapped_out),
            swapped_in=tuple(self.swapped_in),
            new_blocks=tuple(self.new_blocks),
            copies=tuple(self.copies),
            prefix_hits=tuple(self.prefix_hits),
            forks=tuple(dict.fromkeys(self.forks + self.born)) if self.forks or self.born else (),
            arrived=tuple(arrived),
            aborted=tuple(aborted),
            preempted=tuple(self.preempted),
            exhausted=tuple(self.exhausted),
            cache_changes=cache_changes,
            decisions=tuple(decisions),
        )


class StepUpdate(msgspec.Struct):
    """What came of one step."""

    token_ids: list[int]
    """One a row: the token that its sequence took, or ``NO_TOKEN``."""
    checks: dict[int, Check] = {}
    """By row, for those with drafts; ``num_accepted`` are those that its sequence took before that token."""
    returned: list[tuple[int, tuple[int, ...]]] = []
    """(sequence, blocks) that drafts took and gave back, since they were refused."""
    advanced: list[Sequence] = []
    """Sequences that took a token or ended, in row order."""
    finished: list[Finish] = []
    beams: list[tuple[int, ...]] = []
    """The sequences of each beam search that moved on, best first."""
    chosen: list[tuple[int, int]] = []
    """(sequence, token) that its search chose."""
    decisions: list[Decision] = []
