"""KVCacheManager: the one door to the blocks. Each call does all of what it says, or changes nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from refimpl.cache.allocators import BlockAllocator
from refimpl.cache.auditor import Snapshot
from refimpl.cache.block_pool import BlockPool
from refimpl.cache.block_table import BlockTable
from refimpl.cache.prefix_cache import PrefixCache
from refimpl.cache.prefix_index import Key
from refimpl.cache.swap import SwapOut, SwapSpace
from refimpl.cache.usage import cache_usage
from refimpl.errors import PartError
from refimpl.memory_report import CacheUsage
from refimpl.outputs import CacheChanges


class Allocation(msgspec.Struct, frozen=True, gc=False):
    """What a sequence was given for its new tokens."""

    new_blocks: list[int] = []
    """Blocks appended to its table."""
    copies: list[tuple[int, int, int]] = []
    """Copy-on-write: (index in the table, shared block, own block that takes its place)."""


NO_CHANGES = CacheChanges()
NOTHING_NEW = Allocation()
"""The answer to a sequence that has room: one object for all, so never change it."""


class KVCacheManager:
    """Gives sequences the blocks that their tokens need, on demand, and takes them back at once.

    A block may stand in several tables: after a fork, or where prompts begin alike. Reference counts say in how many. Only
    the last block of a table is ever written, and a shared one is copied first (copy-on-write); its last owner writes in
    place. A sequence wastes at most ``block_size - 1`` slots, in its last block.

    Blocks that every layer's window has left behind are kept as long as their sequence: they may still begin other prompts.
    :meth:`ModelConfig.kv_bytes_per_token` says what that costs.
    """

    can_share = True
    """Whether a block may stand in several tables."""
    reserved_blocks: int | None = None
    """Length of each sequence's reservation, where there are any."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        prefix_cache: PrefixCache | None = None,
        allocator: BlockAllocator | None = None,
        num_host_blocks: int = 0,
    ) -> None:
        self.block_size = block_size
        self.pool = BlockPool(num_blocks, allocator)
        self.num_blocks = num_blocks
        self.prefix_cache = prefix_cache
        self.swap = SwapSpace(num_host_blocks)
        self._tables: dict[int, BlockTable] = {}
        self._keys: dict[int, list[Key]] = {}
        """The chain of keys of each sequence's published blocks, its root first."""
        self._ref_counts = [0] * (num_blocks + 1)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that could be handed out now: free ones, and cached ones that no sequence uses."""
        return self.pool.num_free + (self.prefix_cache.num_evictable if self.prefix_cache else 0)

    @property
    def num_stranded_blocks(self) -> int:
        """Free blocks that nobody could ever be given."""
        return 0

    def num_free_blocks_beside(self, cached_blocks: Sequence[int]) -> int:
        """Blocks that could be handed out once a sequence has taken these cached ones."""
        return self.num_free_blocks - (self.prefix_cache.num_unused(cached_blocks) if self.prefix_cache else 0)

    @property
    def capacity(self) -> int:
        """Tokens that the empty cache holds."""
        return self.num_blocks * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that a sequence of ``num_tokens`` tokens takes."""
        return -(-num_tokens // self.block_size)

    def blocks_to_keep(self, share: float) -> int:
        """Blocks to leave free when a sequence is admitted, so that those that run can grow."""
        return int(share * self.num_blocks)

    def blocks_missing(self, sequence_id: int, num_tokens: int) -> int:
        """Blocks that a sequence still needs before it has room for ``num_tokens`` tokens, copies not counted."""
        table = self._tables.get(sequence_id)
        return table.blocks_missing(num_tokens) if table else self.blocks_for(num_tokens)

    def table(self, sequence_id: int) -> tuple[int, ...]:
        """A sequence's block ids; empty if it has none."""
        table = self._tables.get(sequence_id)
        return tuple(table.block_ids) if table else ()

    def num_slots(self, sequence_id: int) -> int:
        """Token slots of a sequence's blocks."""
        table = self._tables.get(sequence_id)
        return table.capacity if table else 0

    def match_prefix(self, token_ids: Sequence[int], salt: str | None) -> list[int]:
        """The cached blocks at the head of a prompt. At least one token is left to compute. Changes nothing."""
        if self.prefix_cache is None:
            return []
        most = (len(token_ids) - 1) // self.block_size
        return self.prefix_cache.lookup(self.prefix_cache.root(salt), token_ids, self.block_size, most)

    def count_query(self, num_tokens: int, num_hit_tokens: int) -> None:
        """Count a prompt's look-up in the prefix cache's statistics."""
        if self.prefix_cache is not None:
            self.prefix_cache.stats.queries += num_tokens
            self.prefix_cache.stats.hits += num_hit_tokens

    def admit(
        self, sequence_id: int, num_tokens: int, cached_blocks: Sequence[int] = (), salt: str | None = None
    ) -> Allocation | None:
        """Begin a sequence's table with the blocks of a prefix hit, and make room for ``num_tokens`` tokens in all.

        The hit is taken before anything is evicted for the rest. None, with nothing changed, if there is too little room.
        """
        assert sequence_id not in self._tables, f"sequence {sequence_id} has a table"
        missing = self.blocks_for(num_tokens) - len(cached_blocks)
        if missing > self.num_free_blocks_beside(cached_blocks):
            return None
        table = self._tables[sequence_id] = BlockTable(self.block_size)
        if self.prefix_cache is not None:
            self.prefix_cache.acquire(cached_blocks)
            self._keys[sequence_id] = [self.prefix_cache.root(salt), *self.prefix_cache.keys_of(cached_blocks)]
        self._reference(table, cached_blocks)
        try:
            new_blocks = self._take(missing)
        except PartError:
            self.free(sequence_id)
            raise
        self._reference(table, new_blocks)
        return Allocation(new_blocks)

    def allocate(self, sequence_id: int, num_computed_tokens: int, num_tokens: int) -> Allocation | None:
        """Make room for the tokens ``[num_computed_tokens, num_tokens)`` of a sequence, which will be written.

        A block among these that others own too is replaced by one of its own, to be filled by a copy. None, with nothing
        changed, if there is too little room.
        """
        table = self._tables.get(sequence_id)
        if table is None:
            return self.admit(sequence_id, num_tokens)
        block_ids = table.block_ids
        end = len(block_ids) * self.block_size
        if num_tokens <= end <= num_computed_tokens + self.block_size and self._ref_counts[block_ids[-1]] == 1:
            return NOTHING_NEW  # only its last block is written, which is its own: most decodes, most of the time
        missing = table.blocks_missing(num_tokens)
        written = range(num_computed_tokens // self.block_size, min(len(table.block_ids), self.blocks_for(num_tokens)))
        shared = [index for index in written if self._ref_counts[table.block_ids[index]] > 1]
        if not missing and not shared:
            return NOTHING_NEW
        if missing + len(shared) > self.num_free_blocks:
            return None
        taken = self._take(len(shared) + missing)
        new_blocks = taken[len(shared) :]
        copies = []
        for index, own in zip(shared, taken, strict=False):
            copies.append((index, table.block_ids[index], own))
            self._ref_counts[table.block_ids[index]] -= 1
            self._ref_counts[own] = 1
            table.replace(index, own)
        self._reference(table, new_blocks)
        return Allocation(new_blocks, copies)

    def fork(self, parent_id: int, child_id: int) -> tuple[int, ...]:
        """Give a child sequence its parent's table: every block is shared, none is copied. Returns the block ids."""
        parent = self._tables[parent_id]
        child = self._tables[child_id] = BlockTable(self.block_size)
        self._reference(child, parent.block_ids)
        if parent_id in self._keys:
            self._keys[child_id] = list(self._keys[parent_id])
        return tuple(child.block_ids)

    def publish(self, sequence_id: int, token_ids: Sequence[int], num_computed_tokens: int) -> None:
        """Make the blocks that are full and computed (or ordered) findable by others. ``token_ids`` are the known ones."""
        keys = self._keys.get(sequence_id)
        if self.prefix_cache is None or keys is None:
            return
        full = min(num_computed_tokens, len(token_ids)) // self.block_size
        if full < len(keys):
            return
        table = self._tables[sequence_id]
        for index in range(len(keys) - 1, full):
            tokens = token_ids[index * self.block_size : (index + 1) * self.block_size]
            keys.append(self.prefix_cache.publish(table.block_ids[index], keys[-1], tokens))

    def free(self, sequence_id: int) -> list[int]:
        """Forget a sequence's table (last block first). Returns the blocks that nobody uses any more."""
        table = self._tables.pop(sequence_id, None)
        self._keys.pop(sequence_id, None)
        return self._dereference(reversed(table.block_ids) if table else ())

    def give_back(self, sequence_id: int, num_tokens: int) -> list[int]:
        """Take back the blocks behind a sequence's first ``num_tokens`` tokens: those of drafts that were refused."""
        return self._dereference(self._tables[sequence_id].cut(self.blocks_for(num_tokens)))

    def _dereference(self, block_ids: Iterable[int]) -> list[int]:
        """Take one mention of each block back. Returns those that nobody uses any more: cached from here on, or free."""
        released, forgotten = [], []
        for block_id in block_ids:
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] == 0:
                released.append(block_id)
                if self.prefix_cache is None or not self.prefix_cache.release(block_id):
                    forgotten.append(block_id)
        self.pool.free(forgotten)
        return released

    def swap_out(self, sequence_id: int) -> SwapOut | None:
        """Move a sequence's blocks to the host, but those that a running sequence uses too, which stay and are held.

        None, with nothing changed, if the host has too little room.
        """
        block_ids = self._tables[sequence_id].block_ids
        moving = self.swap.to_move(block_ids, self._ref_counts)
        if len(moving) > self.swap.num_free:
            return None
        del self._tables[sequence_id]
        transfers = self.swap.put(sequence_id, block_ids, moving)
        for block_id in moving:
            self._ref_counts[block_id] = 1  # whoever else has it is swapped too, and has the host block now
        return SwapOut(transfers, self._dereference(reversed(moving)))

    def blocks_to_resume(self, sequence_id: int, num_computed_tokens: int, num_tokens: int) -> int:
        """Device blocks that a swapped sequence needs to be back with room for ``num_tokens`` tokens, copies counted."""
        places = self.swap.places(sequence_id)
        written = places[num_computed_tokens // self.block_size : self.blocks_for(num_tokens)]
        shared = sum(
            self.swap.owners(place) > 1 or (not place.on_host and self._ref_counts[place.block_id] > 1) for place in written
        )
        return sum(place.on_host for place in places) + max(0, self.blocks_for(num_tokens) - len(places)) + shared

    def swap_in(
        self, sequence_id: int, num_computed_tokens: int, num_tokens: int
    ) -> tuple[Allocation, list[tuple[int, int]]] | None:
        """Bring a swapped sequence's blocks back, and make room for ``num_tokens`` tokens.

        Returns the allocation, whose ``new_blocks`` are its whole table, and the transfers (host block, device block).
        None, with nothing changed, if there is too little room.
        """
        if self.blocks_to_resume(sequence_id, num_computed_tokens, num_tokens) > self.num_free_blocks:
            return None
        on_host = [place for place in self.swap.places(sequence_id) if place.on_host]
        owners = [self.swap.owners(place) for place in on_host]
        taken = self._take(len(on_host))
        block_ids, transfers = self.swap.take(sequence_id, iter(taken))
        for block_id, count in zip(taken, owners, strict=True):
            self._ref_counts[block_id] = count
        table = self._tables[sequence_id] = BlockTable(self.block_size)
        table.append(block_ids)
        try:
            rest = self.allocate(sequence_id, num_computed_tokens, num_tokens)
        except PartError:
            self.free(sequence_id)
            raise
        assert rest is not None, "the blocks were counted above"
        return Allocation(block_ids + rest.new_blocks, rest.copies), transfers

    def drop_swapped(self, sequence_id: int) -> list[int]:
        """Forget a swapped sequence's blocks: it ends, or is computed again. Returns device blocks that nobody uses now."""
        if sequence_id not in self.swap:
            return []
        self._keys.pop(sequence_id, None)
        return self._dereference(self.swap.drop(sequence_id))

    def reset_prefix_cache(self) -> None:
        """Forget all cached content. Blocks in use stay with their sequences, and are not findable any more."""
        if self.prefix_cache is not None:
            self.pool.free(self.prefix_cache.reset())
            self._keys.clear()

    @property
    def was_reset(self) -> bool:
        """Whether the prefix cache was emptied since its changes were last taken."""
        return self.prefix_cache is not None and self.prefix_cache.was_reset

    def take_cache_changes(self) -> CacheChanges:
        """What the prefix cache took in and forgot since the last call."""
        return self.prefix_cache.take_changes() if self.prefix_cache is not None else NO_CHANGES

    def _take(self, count: int) -> list[int]:
        """Blocks from the pool, after evicting what it lacks. The caller has counted."""
        lacking = count - self.pool.num_free
        if lacking > 0:
            assert self.prefix_cache is not None, "the caller has counted"
            self.pool.free(self.prefix_cache.evict(lacking))
        block_ids = self.pool.allocate(count)
        assert block_ids is not None, "the caller has counted"
        return block_ids

    def _reference(self, table: BlockTable, block_ids: Sequence[int]) -> None:
        table.append(block_ids)
        ref_counts = self._ref_counts
        for block_id in block_ids:
            ref_counts[block_id] += 1

    def usage(self, num_computed_tokens: Mapping[int, int]) -> CacheUsage:
        """Blocks and slots as they are used now; the argument says how far each running or swapped sequence is computed.

        Blocks that swapped sequences hold on the device, the heads of their tables, count as theirs.
        """
        tables = {sequence_id: table.block_ids for sequence_id, table in self._tables.items()}
        for sequence_id in self.swap.holders:
            tables[sequence_id] = [place.block_id for place in self.swap.places(sequence_id) if not place.on_host]
        return cache_usage(
            tables,
            {s: min(num_computed_tokens[s], len(table) * self.block_size) for s, table in tables.items()},
            block_size=self.block_size,
            num_blocks=self.num_blocks,
            num_free=self.pool.num_free,
            num_cached=self.prefix_cache.num_evictable if self.prefix_cache else 0,
            num_stranded=self.num_stranded_blocks,
        )

    def snapshot(self, num_computed_tokens: Mapping[int, int]) -> Snapshot:
        """The state as the auditor reads it; the argument says how far each running sequence is computed."""
        return Snapshot(
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            free_ids=self.pool.free_ids,
            cached_ids=self.prefix_cache.unused_ids if self.prefix_cache else (),
            ref_counts={i: count for i, count in enumerate(self._ref_counts) if count},
            tables={sequence_id: tuple(table.block_ids) for sequence_id, table in self._tables.items()},
            num_computed_tokens=dict(num_computed_tokens),
            reserved_blocks=self.reserved_blocks,
            num_host_blocks=self.swap.num_blocks,
            host_free_ids=self.swap.free_ids,
            host_ref_counts=self.swap.ref_counts,
            swapped_tables=self.swap.tables,
        )
