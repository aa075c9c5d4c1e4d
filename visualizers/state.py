"""From event records to plain state: who owns which block, who runs, who waits, and what each step did.

One fold for all: live widgets, replayed logs and tests apply the same records in the order of the log. A record tells what
its step planned and what came of it. With overlap the next step was planned before that was known, so a record may still
hold a row, a block or a preemption of a sequence that the record before ended: what has ended is not touched any more.

Nothing here imports the engine: an event log is all it takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Literal

from refimpl.events import StepRecord, describe
from refimpl.outputs import Decision, Finish
from refimpl.visualizers.words import letters

Phase = Literal["waiting", "running", "preempted", "padding", "finished"]
NULL_BLOCK = 0
NUM_HUES = 8
NEUTRAL = NUM_HUES
"""The hue of the ninth request alive at once, and of all beyond: told apart by letter alone."""


@dataclass(slots=True)
class SequenceState:
    """One sequence as the log tells it."""

    sequence_id: int
    request_id: str
    family: int
    """The first sequence of its request: an id can be used again, this number is not."""
    letter: str
    """A short name for small cells: the request's letter, and ``·1`` for its second sample."""
    name: str
    """The name that people gave it: the request's id, and ``/1`` for its second sample."""
    num_prompt_tokens: int
    token_texts: list[str]
    arrived_at: float
    """Seconds of the log."""
    arrived_step: int
    phase: Phase = "waiting"
    hue: int | None = None
    """0 to 7, or ``NEUTRAL``; None before its first block."""
    slot: int | None = None
    table: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    parent: int | None = None
    token_times: list[float] = field(default_factory=list)
    """When each output token became known, in seconds of the log."""
    finish_reason: str | None = None

    @property
    def num_output_tokens(self) -> int:
        """Output tokens that are known."""
        return len(self.token_texts) - self.num_prompt_tokens

    @property
    def ended(self) -> bool:
        """Whether nothing more comes of it for its user."""
        return self.phase in ("finished", "padding")


@dataclass(frozen=True, slots=True)
class BlockState:
    """One block: its owners, how full it is, and whether its content can be found by others."""

    block_id: int
    owners: tuple[int, ...]
    """Sequence ids, in order of age."""
    index: int
    """Which block of its owners' tables it is; -1 without owners."""
    fill: int
    """Slots that hold a token."""
    published: bool

    @property
    def kind(self) -> Literal["null", "free", "cached", "owned", "shared"]:
        """What to draw."""
        if self.block_id == NULL_BLOCK:
            return "null"
        if not self.owners:
            return "cached" if self.published else "free"
        return "shared" if len(self.owners) > 1 else "owned"


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
        self.sequences: dict[int, SequenceState] = {}
        """All that have not ended, and those that ended in the last record, by id."""
        self.num_requests = 0
        self.num_finished = 0
        self.changed: set[int] = set()
        """Blocks that may look different since somebody last cleared this set."""
        self._owners: dict[int, list[int]] = {}
        self._index: dict[int, int] = {}
        self._published: set[int] = set()
        self._num_shared = self._num_cached = 0
        self._ended: list[int] = []
        """Of the last record; the next one forgets them."""
        self._resting_hues = list(range(NUM_HUES))
        self._hue_of: dict[int, int] = {}
        self._alive_of: dict[int, int] = {}
        """How many sequences of a family are alive."""

    # ------------------------------------------------------------------ reading

    def block(self, block_id: int) -> BlockState:
        """A block as it is now."""
        owners = self._owners.get(block_id, ())
        published = block_id in self._published
        if not owners:
            return BlockState(block_id, (), -1, self.block_size if published else 0, published)
        index = self._index[block_id]
        filled = max(self.sequences[owner].num_computed_tokens for owner in owners) - index * self.block_size
        return BlockState(block_id, tuple(sorted(owners)), index, min(self.block_size, max(0, filled)), published)

    def blocks(self) -> Iterator[BlockState]:
        """All of them, the null block first. O(num_blocks)."""
        return (self.block(block_id) for block_id in range(self.num_blocks + 1))

    def num_owners(self, block_id: int) -> int:
        """In how many tables a block stands."""
        return len(self._owners.get(block_id, ()))

    def shared_blocks(self, most: int) -> Iterator[tuple[int, tuple[int, ...]]]:
        """(block, its owners' sequence ids) of blocks in several tables, at most so many."""
        found = ((block_id, tuple(sorted(owners))) for block_id, owners in self._owners.items() if len(owners) > 1)
        return islice(found, most)

    def counts(self) -> dict[str, int]:
        """Usable blocks by kind: owned by one, shared, cached, free. They sum to ``num_blocks``."""
        used, shared, cached = len(self._owners), self._num_shared, self._num_cached
        return {"owned": used - shared, "shared": shared, "cached": cached, "free": self.num_blocks - used - cached}

    def alive(self) -> list[SequenceState]:
        """Sequences that wait, run or pad a batch, in order of age."""
        return [sequence for _, sequence in sorted(self.sequences.items()) if sequence.phase != "finished"]

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
            del self.sequences[sequence_id]
        self._ended.clear()
        self.truncated |= self.record is None and record.step > 0
        self.record = record
        self._plan(record)
        self._draw(record)

    def _plan(self, record: StepRecord) -> None:
        """What the step's planning did, in the order that :mod:`refimpl.events` gives."""
        for arrival in record.arrived:
            self._arrive(arrival, record)
        if record.cache_changes.reset:
            self._forget(tuple(self._published))
        for finish in (*record.aborted, *record.exhausted):
            self._end(finish)
        for preemption in record.preempted:
            self._preempt(preemption.sequence_id)
        self._forget(record.cache_changes.evicted)
        for parent, child in record.forks:
            if child in self.sequences:
                self.sequences[child].parent = parent
        by_slot = dict(zip(record.slots, record.sequence_ids, strict=True))
        for sequence_id, slot, num_computed_tokens in record.admitted:
            by_slot[slot] = sequence_id
            self._admit(sequence_id, slot, num_computed_tokens)
        for slot in record.restarted:
            if (sequence := self._living(by_slot.get(slot))) is not None:
                sequence.num_computed_tokens = 0
        for slot, block_ids in record.allocated:
            if (sequence := self._living(by_slot.get(slot))) is not None:
                self._extend(sequence, block_ids)
        for copy in record.copies:
            if (sequence := self._living(by_slot.get(copy.slot))) is not None:
                self._disown(sequence.sequence_id, copy.source)
                sequence.table[copy.index] = copy.target
                self._own(sequence.sequence_id, copy.target, copy.index)
        for block_id in record.cache_changes.published:
            if block_id not in self._published:
                self._published.add(block_id)
                self._num_cached += block_id not in self._owners
        self.changed.update(record.cache_changes.published)

    def _draw(self, record: StepRecord) -> None:
        """What the step computed: keys and values, tokens, ends."""
        for sequence_id, num_new_tokens in zip(record.sequence_ids, record.num_new_tokens, strict=True):
            if (sequence := self._living(sequence_id)) is not None:
                first = sequence.num_computed_tokens // self.block_size
                sequence.num_computed_tokens += num_new_tokens
                self.changed.update(sequence.table[first:])
        for sequence_id, token_id, text in zip(record.sequence_ids, record.token_ids, record.token_texts, strict=False):
            if token_id >= 0 and (sequence := self._living(sequence_id)) is not None:
                sequence.token_texts.append(text)
                sequence.token_times.append(record.updated_at)
        for finish in record.finished:
            self._end(finish)

    def _living(self, sequence_id: int | None) -> SequenceState | None:
        sequence = self.sequences.get(sequence_id) if sequence_id is not None else None
        return sequence if sequence is not None and sequence.phase != "finished" else None

    def _arrive(self, arrival: Any, record: StepRecord) -> None:
        letter = letters(self.num_requests)
        self.num_requests += 1
        several = len(arrival.sequence_ids) > 1
        family = arrival.sequence_ids[0]
        self._alive_of[family] = len(arrival.sequence_ids)
        for index, sequence_id in enumerate(arrival.sequence_ids):
            self.sequences[sequence_id] = SequenceState(
                sequence_id=sequence_id,
                request_id=arrival.request_id,
                family=family,
                letter=f"{letter}·{index}" if several else letter,
                name=f"{arrival.request_id}/{index}" if several else arrival.request_id,
                num_prompt_tokens=len(arrival.token_ids),
                token_texts=list(arrival.token_texts),
                arrived_at=record.scheduled_at,
                arrived_step=record.step,
            )

    def _admit(self, sequence_id: int, slot: int, num_computed_tokens: int) -> None:
        if self.truncated and sequence_id not in self.sequences:
            self._arrive_unseen(sequence_id)
        if (sequence := self._living(sequence_id)) is None:
            return
        sequence.phase, sequence.slot, sequence.num_computed_tokens = "running", slot, num_computed_tokens
        if sequence.family not in self._hue_of:
            self._hue_of[sequence.family] = self._resting_hues.pop(0) if self._resting_hues else NEUTRAL
        sequence.hue = self._hue_of[sequence.family]

    def _arrive_unseen(self, sequence_id: int) -> None:
        """A sequence whose arrival is not in the log any more."""
        name = f"sequence {sequence_id}"
        self._alive_of[sequence_id] = 1
        self.sequences[sequence_id] = SequenceState(sequence_id, name, sequence_id, f"?{sequence_id}", name, 0, [], 0.0, 0)

    def _preempt(self, sequence_id: int) -> None:
        if (sequence := self._living(sequence_id)) is not None:
            self._release(sequence)
            sequence.phase, sequence.slot, sequence.num_computed_tokens = "preempted", None, 0
            sequence.num_preemptions += 1

    def _end(self, finish: Finish) -> None:
        if (sequence := self._living(finish.sequence_id)) is None:
            return
        sequence.finish_reason = finish.reason
        if sequence.phase != "padding":
            self.num_finished += 1
            self._rest_hue(sequence)
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
        for block_id in sequence.table:
            self._disown(sequence.sequence_id, block_id)
        sequence.table = []

    def _extend(self, sequence: SequenceState, block_ids: Iterable[int]) -> None:
        for block_id in block_ids:
            self._own(sequence.sequence_id, block_id, len(sequence.table))
            sequence.table.append(block_id)

    def _own(self, sequence_id: int, block_id: int, index: int) -> None:
        owners = self._owners.setdefault(block_id, [])
        owners.append(sequence_id)
        self._num_shared += len(owners) == 2
        self._num_cached -= len(owners) == 1 and block_id in self._published
        self._index[block_id] = index
        self.changed.add(block_id)

    def _disown(self, sequence_id: int, block_id: int) -> None:
        owners = self._owners[block_id]
        owners.remove(sequence_id)
        self._num_shared -= len(owners) == 1
        if not owners:
            self._num_cached += block_id in self._published
            del self._owners[block_id], self._index[block_id]
        self.changed.add(block_id)

    def _forget(self, block_ids: Iterable[int]) -> None:
        for block_id in block_ids:
            if block_id in self._published:
                self._published.remove(block_id)
                self._num_cached -= block_id not in self._owners
        self.changed.update(block_ids)

    def copy(self) -> State:
        """The same state, apart from this one. O(what is alive)."""
        other = State(self.config)
        other.record, other.truncated = self.record, self.truncated
        other.num_requests, other.num_finished = self.num_requests, self.num_finished
        other.sequences = {
            sequence_id: replace(s, table=list(s.table), token_texts=list(s.token_texts), token_times=list(s.token_times))
            for sequence_id, s in self.sequences.items()
        }
        other._owners = {block_id: list(owners) for block_id, owners in self._owners.items()}
        other._index, other._published = dict(self._index), set(self._published)
        other._num_shared, other._num_cached = self._num_shared, self._num_cached
        other._resting_hues, other._hue_of = list(self._resting_hues), dict(self._hue_of)
        other._alive_of = dict(self._alive_of)
        other._ended = list(self._ended)
        return other
