"""The auditor: checks the cache's books from the outside, on a snapshot, without the code that keeps them.

Two levels here. *Ownership*: every block is free, or cached and unused, or in tables, exactly one of the three; its
reference count is the number of tables that mention it. *Lengths*: a table has the blocks that its computed tokens need,
and no more. The third level, what is *in* the blocks, is :mod:`refimpl.cache.shadow`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Literal

import msgspec

from refimpl.cache.swap import Place


class Snapshot(msgspec.Struct, frozen=True):
    """The cache's books at one moment."""

    num_blocks: int
    block_size: int
    free_ids: tuple[int, ...]
    cached_ids: tuple[int, ...]
    """Blocks that the prefix cache owns: their content is known, and no sequence uses them."""
    ref_counts: dict[int, int]
    """In how many tables each block is, by the manager's own count; blocks in none are left out."""
    tables: dict[int, tuple[int, ...]]
    """Block ids of each sequence, by sequence id."""
    num_computed_tokens: dict[int, int]
    """How far each running or swapped sequence is computed (or ordered to be), by sequence id."""
    reserved_blocks: int | None = None
    """Where each sequence has one contiguous reservation, its length."""
    num_host_blocks: int = 0
    host_free_ids: tuple[int, ...] = ()
    host_ref_counts: dict[int, int] = {}
    """In how many swapped tables each host block is, by the swap space's own count."""
    swapped_tables: dict[int, tuple[Place, ...]] = {}
    """Where the blocks of each swapped sequence are, by sequence id. Those on the device are mentions like any other."""


class Violation(msgspec.Struct, frozen=True):
    """One thing that is wrong, as a sentence."""

    level: Literal["ownership", "lengths", "contents"]
    text: str


def audit(snapshot: Snapshot) -> list[Violation]:
    """Everything that is wrong with a snapshot; empty when it is clean."""
    ownership = [*_ownership(snapshot), *_host_ownership(snapshot)]
    return [Violation("ownership", text) for text in ownership] + [Violation("lengths", text) for text in _lengths(snapshot)]


def _ownership(snapshot: Snapshot) -> Iterator[str]:
    free, cached = Counter(snapshot.free_ids), Counter(snapshot.cached_ids)
    owners: dict[int, list[int]] = {}
    for sequence_id, block_ids in snapshot.tables.items():
        for block_id in block_ids:
            owners.setdefault(block_id, []).append(sequence_id)
    for sequence_id, places in snapshot.swapped_tables.items():
        for place in places:
            if not place.on_host:
                owners.setdefault(place.block_id, []).append(sequence_id)
    legal = range(1, snapshot.num_blocks + 1)
    for block_id in sorted((free.keys() | cached.keys() | owners.keys()) - set(legal)):
        what = "the null block" if block_id == 0 else f"block {block_id}, which does not exist,"
        if block_id in owners:
            yield f"{what} is in the table of {owners[block_id]}"
        if block_id in free or block_id in cached:
            yield f"{what} is {'free' if block_id in free else 'cached'}"
    for block_id in legal:
        owned_by = owners.get(block_id, [])
        for name, times in (("free list", free[block_id]), ("prefix cache", cached[block_id])):
            if times > 1:
                yield f"block {block_id} is in the {name} {times} times"
            if times and owned_by:
                yield f"block {block_id} is in the {name} and in the table of {owned_by}"
        if free[block_id] and cached[block_id]:
            yield f"block {block_id} is free and cached"
        if len(set(owned_by)) < len(owned_by):
            yield f"block {block_id} is twice in one table of {owned_by}"
        if (count := snapshot.ref_counts.get(block_id, 0)) != len(owned_by):
            yield f"block {block_id} has reference count {count}, but is in the tables of {owned_by}"
        if not free[block_id] and not cached[block_id] and not owned_by:
            yield f"block {block_id} is lost: neither free nor cached nor in a table"


def _host_ownership(snapshot: Snapshot) -> Iterator[str]:
    free = Counter(snapshot.host_free_ids)
    mentions = Counter(p.block_id for places in snapshot.swapped_tables.values() for p in places if p.on_host)
    for sequence_id in snapshot.swapped_tables.keys() & snapshot.tables.keys():
        yield f"sequence {sequence_id} is swapped out and has a table"
    for host_id in sorted((free.keys() | mentions.keys()) - set(range(1, snapshot.num_host_blocks + 1))):
        yield f"host block {host_id} does not exist"
    for host_id in range(1, snapshot.num_host_blocks + 1):
        if free[host_id] > 1:
            yield f"host block {host_id} is in the free list {free[host_id]} times"
        if free[host_id] and mentions[host_id]:
            yield f"host block {host_id} is free and in a swapped table"
        if (count := snapshot.host_ref_counts.get(host_id, 0)) != mentions[host_id]:
            yield f"host block {host_id} has reference count {count}, but is in {mentions[host_id]} swapped tables"
        if not free[host_id] and not mentions[host_id]:
            yield f"host block {host_id} is lost: neither free nor in a swapped table"


def _lengths(snapshot: Snapshot) -> Iterator[str]:
    for sequence_id in snapshot.tables.keys() | snapshot.swapped_tables.keys() | snapshot.num_computed_tokens.keys():
        computed = snapshot.num_computed_tokens.get(sequence_id)
        has = len(snapshot.tables.get(sequence_id, snapshot.swapped_tables.get(sequence_id, ())))
        if computed is None:
            yield f"sequence {sequence_id} does not run but has {has} blocks"
            continue
        needs = -(-computed // snapshot.block_size)
        if snapshot.reserved_blocks is not None:
            table = snapshot.tables.get(sequence_id, ())
            first = min(table, default=0)
            if table != tuple(range(first, first + snapshot.reserved_blocks)):
                yield f"sequence {sequence_id} has blocks {table}, not {snapshot.reserved_blocks} in one run"
            needs = max(needs, snapshot.reserved_blocks)
        if has != needs:
            yield f"sequence {sequence_id} has {has} blocks, but its {computed} computed tokens need {needs}"
