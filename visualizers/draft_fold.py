"""Drafts in the fold of an event log: all count as computed when a step is planned; what was refused is taken back."""

from __future__ import annotations

from collections.abc import Callable

from refimpl.events import StepRecord
from refimpl.visualizers.blocks import Blocks
from refimpl.visualizers.sequence_state import SequenceState

Living = Callable[[int | None], SequenceState | None]
"""Finds a sequence that has not ended."""


def take_drafts(record: StepRecord, living: Living, blocks: Blocks) -> set[tuple[int, int]]:
    """Give sequences the drafts that were accepted, and take back what was counted and taken for the others.

    Returns (sequence, block) of those given back that only the next record allocates: with overlap it was planned before.
    """
    if not record.num_drafts:
        return set()
    rows = zip(record.sequence_ids, record.num_drafts, record.num_accepted, record.draft_texts, strict=True)
    for sequence_id, num_drafts, num_accepted, texts in rows:
        if (sequence := living(sequence_id)) is None or not num_drafts:
            continue
        sequence.num_computed_tokens -= num_drafts - num_accepted
        sequence.texts += texts[len(sequence.texts) - sequence.num_tokens : num_accepted]
        sequence.num_tokens += num_accepted
    early = set()
    for sequence_id, block_ids in record.returned:
        if (sequence := living(sequence_id)) is not None:
            here = set(block_ids) & set(sequence.table)
            early |= {(sequence_id, block_id) for block_id in block_ids if block_id not in here}
            blocks.disown(sequence_id, tuple(here))
            sequence.table = [block_id for block_id in sequence.table if block_id not in here]
    return early
