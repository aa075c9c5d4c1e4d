"""From event records to plain state: who owns which block, who runs, who waits, and what each step did.

One fold for all: live widgets, replayed logs and tests apply the same records in the order of the log. A record tells what
its step planned and what came of it. With overlap the next step was planned before that was known, so a record may still
hold a row, a block or a preemption of a sequence that the record before ended: what has ended is not touched any more.

Nothing here imports the engine: an event log is all it takes.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any, Self

import numpy as np

from refimpl.decision_texts import describe
from refimpl.events import StepRecord
from refimpl.outputs import NO_TOKEN, Decision, Finish, Preemption
from refimpl.visualizers.blocks import Blocks, BlockState
from refimpl.visualizers.draft_fold import take_drafts
from refimpl.visualizers.kept import Kept
from refimpl.visualizers.last_batch import LastBatch
from refimpl.visualizers.sequence_state import NEUTRAL, NUM_HUES, SequenceState
from refimpl.visualizers.swapped import Swapped
from refimpl.visualizers.words import letters


class State:
    """The engine at one moment of its log. ``apply`` takes the next record.

    Args:
        config: the log header's ``config``.

    """

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.block_size: int = config["block_size"]
        self.num_blocks: int = config["num_blocks"]
        """Usable ones; with the null block, ids go from 0 to ``num_blocks``."""
        self.truncated = False
        """Whether the log began in the middle of a run: what ran before it is not known."""
        self.record: StepRecord | None = None
        """The record applied last."""
        self._sequences: dict[int, SequenceState] = {}
        self._alive: list[SequenceState] | None = None
        """What ``alive`` answered since the last record."""
        self._batch = LastBatch()
        self.num_requests = 0
        self.num_finished = 0
        self.blocks = Blocks(self.num_blocks)
        self.num_host_blocks: int = config.get("num_host_blocks", 0)
        """Of the swap space."""
        self.swapped = Swapped(self.blocks)
        self._to_come: dict[int, str] = {}
        """The last token of beams that fork off in the next record, by sequence id."""
        self._returned_early: set[tuple[int, int]] = set()
        """(sequence, block) that the next record allocates, for drafts that are refused already."""
        self._ended: list[int] = []
        """Of the last record; the next one forgets them."""
        self._resting_hues = list(range(NUM_HUES))
        self._hue_of: dict[int, int] = {}
        self._alive_of: dict[int, int] = {}
        """How many sequences of a family are alive."""

    # ------------------------------------------------------------------ reading

    @property
    def sequences(self) -> dict[int, SequenceState]:
        """All that have not ended, and those that ended in the last record, by id."""
        if self._batch.untold:
            self._batch.tell(self._sequences)
        return self._sequences

    def block(self, block_id: int) -> BlockState:
        """A block as it is now."""
        owners, published = tuple(self.blocks.owners(block_id)), self.blocks.is_published(block_id)
        if not owners:
            return BlockState(block_id, (), -1, self.block_size if published else 0, published)
        index = self.blocks.index(block_id)
        filled = max(self.sequences[owner].num_computed_tokens for owner in owners) - index * self.block_size
        return BlockState(block_id, owners, index, min(self.block_size, max(0, filled)), published)

    def fills(self) -> np.ndarray[Any, Any]:
        """By block id, slots that hold a token. Only the blocks at the ends of tables are looked at one by one."""
        size, num_owners = self.block_size, self.blocks.num_owners
        filled = ((num_owners > 0) | (self.blocks.published > 0)) * np.uint16(size)
        ends: list[int] = []
        own: list[int] = []
        for sequence in self.sequences.values():
            whole, rest = divmod(sequence.num_computed_tokens, size)
            if left := sequence.table[whole:]:
                ends += left
                own += (rest, *(0,) * (len(left) - 1))
        filled[ends] = own
        several = np.asarray(ends, dtype=np.intp)[num_owners[ends] > 1].tolist() if self.blocks.shared else []
        for one in (*several, *(one for sequence_id in self.swapped.tables for _, one in self.swapped.held(sequence_id))):
            filled[one] = self.block(one).fill
        return filled

    def shared_blocks(self, most: int) -> Iterator[tuple[int, tuple[int, ...]]]:
        """(block, its owners' sequence ids) of blocks in several tables, at most so many."""
        return islice(((block_id, tuple(owners)) for block_id, owners in self.blocks.shared.items()), most)

    def counts(self) -> dict[str, int]:
        """Usable blocks by kind: owned by one, shared, cached, free. They sum to ``num_blocks``."""
        used, shared, cached = self.blocks.num_used, len(self.blocks.shared), self.blocks.num_cached
        return {"owned": used - shared, "shared": shared, "cached": cached, "free": self.num_blocks - used - cached}

    def device_blocks(self, sequence: SequenceState) -> list[tuple[int, int]]:
        """(index in its table, block) of all that a sequence owns on the device, swapped or not."""
        return list(enumerate(sequence.table)) if sequence.table else self.swapped.held(sequence.sequence_id)

    def num_device_blocks(self, sequence: SequenceState) -> int:
        """How many they are."""
        return len(sequence.table) or len(self.swapped.held(sequence.sequence_id))

    def alive(self) -> list[SequenceState]:
        """Sequences that wait, run or pad a batch, in order of age. The list is the state's own, until the next record."""
        if self._alive is None:
            self._alive = [sequence for _, sequence in sorted(self.sequences.items()) if sequence.phase != "finished"]
        return self._alive

    def sentences(self) -> list[tuple[str, str]]:
        """(letter of the sequence, why) for each decision of the last record, in words."""
        if self.record is None:
            return []
        return [(self._letter(decision), describe(decision)) for decision in self.record.decisions]

    def _letter(self, decision: Decision) -> str:
        sequence = self.sequences.get(decision.sequence_id)
        return sequence.letter if sequence else f"sequence {decision.sequence_id}"

    # ------------------------------------------------------------------ folding

    def apply(self, record: StepRecord) -> None:
        """Take the next record of the log."""
        for sequence_id in self._ended:
            del self._sequences[sequence_id]
        self._ended.clear()
        self._alive = None
        self.truncated |= self.record is None and record.step > 0
        self.record = record
        if self._batch.goes_on(record):
            self._plan(record)
            self._batch.add(record)
        else:
            self._batch.tell(self._sequences)
            self._plan(record)
            self._draw(record)

    def _plan(self, record: StepRecord) -> None:
        """What the step's planning did, in the order that :mod:`refimpl.events` gives."""
        for arrival in record.arrived:
            self._arrive(arrival, record)
        if record.cache_changes.reset:
            self.blocks.unpublish_all()
        for finish in (*record.aborted, *record.exhausted):
            self._end(finish)
        moved = dict(record.swapped_out)
        self.swapped.move_out(moved)
        for preemption in record.preempted:
            self._preempt(preemption, moved)
        self.blocks.unpublish(record.cache_changes.evicted)
        for parent, child in record.forks:
            if child not in self._sequences and parent in self._sequences:
                self._branch(self._sequences[parent], child, record)
                for preemption in (one for one in record.preempted if one.sequence_id == child):  # before it ever ran
                    self._preempt(preemption, moved)
            if child in self._sequences:
                self._sequences[child].parent = parent
        self.swapped.move_in({host_id: block_id for block_id, host_id in record.swapped_in})
        for sequence_id, slot, num_computed_tokens in record.admitted:
            self._admit(sequence_id, slot, num_computed_tokens)
        by_slot = self._batch.by_slot(record)
        for slot in record.restarted:
            if (sequence := self._living(by_slot.get(slot))) is not None:
                sequence.num_computed_tokens = 0
        for slot, block_ids in record.allocated:
            if (sequence := self._living(by_slot.get(slot))) is not None:
                kept = [one for one in block_ids if (sequence.sequence_id, one) not in self._returned_early]
                self.blocks.own(sequence.sequence_id, kept, len(sequence.table))
                sequence.table.extend(kept)
        for copy in record.copies:
            if (sequence := self._living(by_slot.get(copy.slot))) is not None:
                self.blocks.disown(sequence.sequence_id, (copy.source,))
                sequence.table[copy.index] = copy.target
                self.blocks.own(sequence.sequence_id, (copy.target,), copy.index)
        self.blocks.publish(record.cache_changes.published)

    def _draw(self, record: StepRecord) -> None:
        """What the step computed: keys and values, tokens, ends."""
        sequences = self._sequences
        self._batch.begin(record)
        for sequence_id, num_new_tokens in zip(record.sequence_ids, record.num_new_tokens, strict=True):
            if (sequence := sequences.get(sequence_id)) is not None and sequence.phase != "finished":
                sequence.num_computed_tokens += num_new_tokens
        self._returned_early = take_drafts(record, self._living, self.blocks)
        for sequence_id, token_id, text in zip(record.sequence_ids, record.token_ids, record.token_texts, strict=False):
            sequence = sequences.get(sequence_id) if token_id != NO_TOKEN else None
            if sequence is not None and sequence.phase != "finished":
                if len(sequence.texts) == sequence.num_tokens:
                    sequence.texts.append(text)
                sequence.num_tokens += 1
        for sequence_id, _, text in record.chosen:
            self._to_come[sequence_id] = text
            if (one := sequences.get(sequence_id)) is not None:
                one.texts = [*one.token_texts, self._to_come.pop(sequence_id)]
                one.num_tokens += 1
        for finish in record.finished:
            self._end(finish)

    def _branch(self, parent: SequenceState, sequence_id: int, record: StepRecord) -> None:
        """A beam forks off another, which has its own token already."""
        first = self._sequences.get(parent.family, parent)
        self._alive_of[parent.family] = self._alive_of.get(parent.family, 0) + 1
        number = sequence_id - parent.family
        texts = [*parent.token_texts[:-1], self._to_come.pop(sequence_id, "")]
        self._sequences[sequence_id] = SequenceState(
            sequence_id=sequence_id,
            request_id=parent.request_id,
            family=parent.family,
            letter=f"{first.letter.split('·')[0]}·{number}",
            name=f"{parent.request_id}/{number}",
            num_prompt_tokens=parent.num_prompt_tokens,
            texts=texts,
            num_tokens=len(texts),
            arrived_at=record.scheduled_at,
            arrived_step=record.step,
        )

    def _living(self, sequence_id: int | None) -> SequenceState | None:
        sequence = self._sequences.get(sequence_id) if sequence_id is not None else None
        return sequence if sequence is not None and sequence.phase != "finished" else None

    def _arrive(self, arrival: Any, record: StepRecord) -> None:
        letter = letters(self.num_requests)
        self.num_requests += 1
        several = len(arrival.sequence_ids) > 1
        family = arrival.sequence_ids[0]
        self._alive_of[family] = len(arrival.sequence_ids)
        for index, sequence_id in enumerate(arrival.sequence_ids):
            self._sequences[sequence_id] = SequenceState(
                sequence_id=sequence_id,
                request_id=arrival.request_id,
                family=family,
                letter=f"{letter}·{index}" if several else letter,
                name=f"{arrival.request_id}/{index}" if several else arrival.request_id,
                num_prompt_tokens=len(arrival.token_ids),
                texts=list(arrival.token_texts),
                num_tokens=len(arrival.token_texts),
                arrived_at=record.scheduled_at,
                arrived_step=record.step,
            )

    def _admit(self, sequence_id: int, slot: int, num_computed_tokens: int) -> None:
        if self.truncated and sequence_id not in self._sequences:
            self._arrive_unseen(sequence_id)
        if (sequence := self._living(sequence_id)) is None:
            return
        self.swapped.drop(sequence_id)  # ``allocated`` says its whole table
        sequence.phase, sequence.slot, sequence.num_computed_tokens = "running", slot, num_computed_tokens
        if sequence.family not in self._hue_of:
            self._hue_of[sequence.family] = self._resting_hues.pop(0) if self._resting_hues else NEUTRAL
        sequence.hue = self._hue_of[sequence.family]

    def _arrive_unseen(self, sequence_id: int) -> None:
        """A sequence whose arrival is not in the log any more."""
        name = f"sequence {sequence_id}"
        self._alive_of[sequence_id] = 1
        self._sequences[sequence_id] = SequenceState(
            sequence_id, name, sequence_id, f"?{sequence_id}", name, 0, [], 0, 0.0, 0
        )

    def _preempt(self, preemption: Preemption, moved: dict[int, int]) -> None:
        """A running sequence gives way; or a swapped one loses its blocks, which was preempted before."""
        if (sequence := self._living(preemption.sequence_id)) is None:
            return
        sequence.num_preemptions += sequence.sequence_id not in self.swapped
        if preemption.mode == "swap":
            self.swapped.put(sequence.sequence_id, sequence.table, moved)
            sequence.table = []
            sequence.phase, sequence.slot = "swapped", None
        else:
            self._release(sequence)
            sequence.phase, sequence.slot, sequence.num_computed_tokens = "preempted", None, 0

    def _end(self, finish: Finish) -> None:
        if (sequence := self._living(finish.sequence_id)) is None:
            return
        sequence.finish_reason = finish.reason
        if sequence.phase != "padding":
            self._rest_hue(sequence)
            self.num_finished += finish.reason != "pruned" or sequence.family not in self._alive_of
        if finish.stays:
            sequence.phase = "padding"
            return
        self._release(sequence)
        sequence.phase, sequence.slot = "finished", None
        self._ended.append(sequence.sequence_id)

    def _rest_hue(self, sequence: SequenceState) -> None:
        """The hue of a request rests when its last sequence ends; the one that rested longest is next."""
        self._alive_of[sequence.family] -= 1
        if self._alive_of[sequence.family] == 0:
            del self._alive_of[sequence.family]
            hue = self._hue_of.pop(sequence.family, NEUTRAL)
            if hue != NEUTRAL:
                self._resting_hues.append(hue)

    def _release(self, sequence: SequenceState) -> None:
        self.swapped.drop(sequence.sequence_id)
        self.blocks.disown(sequence.sequence_id, sequence.table)
        sequence.table = []

    def prefilling(self) -> list[int]:
        """Sequences that compute tokens which were known before: they end one behind, or without an own token."""
        running = (one for one in self.sequences.values() if one.phase == "running")
        return [s.sequence_id for s in running if not s.num_output_tokens or s.num_computed_tokens < s.num_tokens - 1]

    def keep(self) -> Kept:
        """All of the state in little room: tables, and a bit a block. O(what is alive)."""
        numbers = {name: getattr(self, name) for name in _NUMBERS}
        books = {name: getattr(self, name).copy() for name in _BOOKS}
        alive = [replace(one, table=array("i", one.table)) for one in self.sequences.values()]  # type: ignore[arg-type]
        return Kept(self.config, numbers, books, alive, self.swapped.keep(), self.blocks.findable())

    @classmethod
    def of(cls, kept: Kept) -> Self:
        """A state as it was when it was kept."""
        state = cls(kept.config)
        for name, number in kept.numbers.items():
            setattr(state, name, number)
        for name, book in kept.books.items():
            setattr(state, name, book.copy())
        for one in kept.alive:
            sequence = state._sequences[one.sequence_id] = replace(one, table=list(one.table))
            state.blocks.own(sequence.sequence_id, sequence.table, 0)
        state.swapped.take(kept.swapped)
        state.blocks.publish_as(kept.findable)
        return state


_NUMBERS = ("record", "truncated", "num_requests", "num_finished")
_BOOKS = ("_resting_hues", "_hue_of", "_alive_of", "_ended", "_to_come", "_returned_early")
