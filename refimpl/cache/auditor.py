"""The auditor: checks the cache's books from the outside, on a snapshot, without the code that keeps them.

Two levels so far. *Ownership*: every block is free or in exactly one place of exactly one table. *Lengths*: a table has
the blocks that its computed tokens need, and no more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Literal

import msgspec


class Snapshot(msgspec.Struct, frozen=True):
    """The cache's books at one moment."""

    num_blocks: int
    block_size: int
    free_ids: tuple[int, ...]
    tables: dict[int, tuple[int, ...]]
    """Block ids of each sequence, by sequence id."""
    num_computed_tokens: dict[int, int]
    """How far each running sequence is computed (or ordered to be), by sequence id."""


class Violation(msgspec.Struct, frozen=True):
    """One thing that is wrong, as a sentence."""

    level: Literal["ownership", "lengths"]
    text: str


def audit(snapshot: Snapshot) -> list[Violation]:
    """Everything that is wrong with a snapshot; empty when it is clean."""
    return [Violation("ownership", text) for text in _ownership(snapshot)] + [
        Violation("lengths", text) for text in _lengths(snapshot)
    ]


def _ownership(snapshot: Snapshot) -> Iterator[str]:
    free = Counter(snapshot.free_ids)
    owners: dict[int, list[int]] = {}
    for sequence_id, block_ids in snapshot.tables.items():
        for block_id in block_ids:
            owners.setdefault(block_id, []).append(sequence_id)
    legal = range(1, snapshot.num_blocks + 1)
    for block_id in sorted((free.keys() | owners.keys()) - set(legal)):
        what = "the null block" if block_id == 0 else f"block {block_id}, which does not exist,"
        yield f"{what} is {'free' if block_id in free else f'in the table of {owners[block_id]}'}"
    for block_id in legal:
        times_free, owned_by = free[block_id], owners.get(block_id, [])
        if times_free > 1:
            yield f"block {block_id} is in the free list {times_free} times"
        if times_free and owned_by:
            yield f"block {block_id} is free and in the table of {owned_by}"
        if len(owned_by) > 1:
            yield f"block {block_id} is in the tables of {owned_by}"
        if not times_free and not owned_by:
            yield f"block {block_id} is lost: neither free nor in a table"


def _lengths(snapshot: Snapshot) -> Iterator[str]:
    for sequence_id in snapshot.tables.keys() | snapshot.num_computed_tokens.keys():
        computed = snapshot.num_computed_tokens.get(sequence_id)
        has = len(snapshot.tables.get(sequence_id, ()))
        if computed is None:
            yield f"sequence {sequence_id} does not run but has {has} blocks"
            continue
        needs = -(-computed // snapshot.block_size)
        if has != needs:
            yield f"sequence {sequence_id} has {has} blocks, but its {computed} computed tokens need {needs}"
