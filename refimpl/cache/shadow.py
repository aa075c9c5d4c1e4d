"""The auditor's third level: what is *in* the blocks.

A shadow executor that knows nothing of the manager and nothing of tensors. It replays each SchedulerOutput in the runner's
order — tables, copies, writes, reads — but stores, in place of a key and a value, a fingerprint of the prefix that they were
computed from. Before a row reads its context it checks that every slot of it holds the fingerprint of the row's own prefix.
This alone sees a copy that is missing, late or of the wrong block, a stale ``num_computed_tokens``, and a block that was
freed while somebody still reads it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from refimpl.cache.auditor import Violation
from refimpl.outputs import NO_TOKEN, Admission, Check, ModelRunnerOutput, SchedulerOutput

Draw = Callable[[int, Sequence[int]], int]
"""(path of the sequence, its tokens so far) → the next token."""


@dataclass
class _Slot:
    """What an executor knows of the sequence in one slot."""

    sequence_id: int
    path: int
    token_ids: list[int]
    num_computed_tokens: int
    block_ids: list[int] = field(default_factory=list)
    prints: list[bytes] = field(default_factory=list)
    """The fingerprint of each prefix of ``token_ids``, so far as they were needed."""

    def fingerprint(self, position: int) -> bytes:
        """Stands for the tokens up to and with ``position``."""
        while len(self.prints) <= position:
            parent = self.prints[-1] if self.prints else b""
            token = self.token_ids[len(self.prints)].to_bytes(4, "little")
            self.prints.append(hashlib.blake2b(parent + token, digest_size=8).digest())
        return self.prints[position]


class ShadowExecutor:
    """Runs the real scheduler without a model, and notes every read of a slot that the reader's own prefix did not write.

    Args:
        block_size: tokens in a block.
        draw: the next token of a sequence; a function of its path and tokens, as a model's would be.
        draft: guesses it, for steps with drafts.

    """

    def __init__(self, block_size: int, draw: Draw, draft: Draw | None = None) -> None:
        self.block_size = block_size
        self.violations: list[Violation] = []
        self._draw = draw
        self._draft = draft or draw
        self._slots: dict[int, _Slot] = {}
        self._memory: dict[tuple[int, int], bytes] = {}
        """(block id, offset) → fingerprint; what was never written is missing."""
        self._host_memory: dict[tuple[int, int], bytes] = {}

    def table(self, slot: int) -> tuple[int, ...]:
        """The blocks of the sequence in a slot, as it was told of them."""
        return tuple(self._slots[slot].block_ids)

    def run(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Replay a step and draw its tokens."""
        self._apply(output)
        batch, checks = output.batch, {}
        rows = list(zip(batch.slots, batch.num_new_tokens, batch.num_drafts or (0,) * len(batch.slots), strict=True))
        for number, count, num_drafts in rows:  # all rows write before any row reads, as in each layer of a model
            self._write(self._slots[number], count, num_drafts)
        tokens = []
        for row, (number, _, num_drafts) in enumerate(rows):
            self._read(self._slots[number], output.step)
            if num_drafts:
                checks[row] = self._check(self._slots[number], num_drafts)
            tokens.append(self._next(self._slots[number]))
        return ModelRunnerOutput(tuple(tokens), checks=checks)

    def _apply(self, output: SchedulerOutput) -> None:
        for refusal in output.refused:  # how far a slot is, is known here already
            table = self._slots[refusal.slot].block_ids
            del table[len(table) - refusal.num_blocks :]
        self._copy(self._memory, self._host_memory, output.swapped_out)
        self._copy(self._host_memory, self._memory, output.swapped_in)
        for admission in output.admitted:
            self._slots[admission.slot] = _admitted(admission)
        for number in output.restarted:
            self._slots[number].num_computed_tokens = 0
        for blocks in output.new_blocks:
            self._slots[blocks.slot].block_ids.extend(blocks.block_ids)
        for copy in output.copies:
            self._slots[copy.slot].block_ids[copy.index] = copy.target
        self._copy(self._memory, self._memory, [(copy.source, copy.target) for copy in output.copies])

    def _copy(
        self,
        source: dict[tuple[int, int], bytes],
        target: dict[tuple[int, int], bytes],
        blocks: Sequence[tuple[int, int]],
    ) -> None:
        """Copy whole blocks, (from, to) each, all at once: what one copy writes never feeds another."""
        before = dict(source) if source is target else source
        for source_id, target_id in blocks:
            for offset in range(self.block_size):
                if (source_id, offset) in before:
                    target[target_id, offset] = before[source_id, offset]
                else:
                    target.pop((target_id, offset), None)

    def _place(self, slot: _Slot, position: int) -> tuple[int, int]:
        return slot.block_ids[position // self.block_size], position % self.block_size

    def _write(self, slot: _Slot, count: int, num_drafts: int) -> None:
        for _ in range(num_drafts):
            slot.token_ids.append(self._draft(slot.path, slot.token_ids))
        for position in range(slot.num_computed_tokens, slot.num_computed_tokens + count):
            self._memory[self._place(slot, position)] = slot.fingerprint(position)
        slot.num_computed_tokens += count

    def _read(self, slot: _Slot, step: int) -> None:
        """What the last token of a row reads, drafts included: all that the others of the row read."""
        for position in range(slot.num_computed_tokens):
            place = self._place(slot, position)
            if self._memory.get(place) != slot.fingerprint(position):
                what = "what another prefix wrote" if place in self._memory else "what nobody wrote"
                text = f"step {step}: sequence {slot.sequence_id} reads {what} at position {position}, block {place[0]}"
                self.violations.append(Violation("contents", text))
                break

    def _check(self, slot: _Slot, num_drafts: int) -> Check:
        """Accept drafts as long as they are what would have been drawn; forget the others."""
        first, accepted = len(slot.token_ids) - num_drafts, 0
        drafts = tuple(slot.token_ids[first:])
        while accepted < num_drafts and drafts[accepted] == self._draw(slot.path, slot.token_ids[: first + accepted]):
            accepted += 1
        slot.num_computed_tokens -= num_drafts - accepted
        del slot.token_ids[first + accepted :], slot.prints[first + accepted :]
        return Check(drafts, accepted)

    def _next(self, slot: _Slot) -> int:
        if slot.num_computed_tokens < len(slot.token_ids):
            return NO_TOKEN
        slot.token_ids.append(self._draw(slot.path, slot.token_ids))
        return slot.token_ids[-1]


def _admitted(admission: Admission) -> _Slot:
    return _Slot(admission.sequence_id, admission.path, list(admission.token_ids), admission.num_computed_tokens)
