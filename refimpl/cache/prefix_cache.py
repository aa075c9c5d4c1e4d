"""PrefixCache: full blocks by what is in them, so that a later prompt with the same beginning computes only the rest.

A block's key is a hash over its parent's key and its own tokens, so one key stands for the whole prefix up to it; the chain
begins with the request's salt. Keys are stable over processes. A key alone is not believed: parent and tokens are compared.

The index owns the cached blocks that no sequence uses. They stay allocated until room is needed; then the least recently
used goes first, and of one chain the last block, so that what stays can still be reached from its beginning.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

Key = bytes

_ROOT_SALTED, _ROOT_PLAIN = b"refimpl salt", b"refimpl root"


def root_key(salt: str | None, tag: str = "") -> Key:
    """The parent of a first block. Salt and tag (an adapter's name, say) are kept apart: each gives its own chain."""
    person = _ROOT_PLAIN if salt is None else _ROOT_SALTED
    digest = hashlib.blake2b(digest_size=16, person=person)
    for part in (salt or "", tag):
        encoded = part.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return digest.digest()


def block_key(parent: Key, token_ids: Sequence[int]) -> Key:
    """The key of a full block after the prefix that ``parent`` stands for."""
    digest = hashlib.blake2b(parent, digest_size=16, person=b"refimpl blk")
    digest.update(b"".join(token.to_bytes(4, "little") for token in token_ids))
    return digest.digest()


@dataclass(eq=False)
class CachedBlock:
    """A full block whose content is known."""

    block_id: int
    key: Key
    parent: Key
    token_ids: tuple[int, ...]
    used: bool = True
    """Whether a sequence has it in its table."""
    last_used: int = 0
    unused_children: int = 0
    """Cached blocks right behind it that no sequence uses: they go first."""
    counted_in: CachedBlock | None = None
    """The parent whose ``unused_children`` counts this block."""


@dataclass
class PrefixCacheStats:
    """Counted in tokens (queries, hits) and blocks (evictions) since the engine began."""

    queries: int = 0
    hits: int = 0
    evictions: int = 0


@dataclass
class PrefixCache:
    """The index of cached blocks. ``make_key`` can be replaced, to test what happens when keys collide."""

    make_key: Callable[[Key, Sequence[int]], Key] = block_key
    stats: PrefixCacheStats = field(default_factory=PrefixCacheStats)
    _by_key: dict[Key, CachedBlock] = field(default_factory=dict)
    _by_block: dict[int, CachedBlock] = field(default_factory=dict)
    _unused: int = 0
    _heap: list[tuple[int, int]] = field(default_factory=list)
    """(last used, block id) of unused blocks without unused children; stale entries are skipped."""
    _clock: int = 0

    def __len__(self) -> int:
        return len(self._by_key)

    @property
    def num_evictable(self) -> int:
        """Blocks that ``evict`` could give back: cached, and used by no sequence."""
        return self._unused

    @property
    def unused_ids(self) -> tuple[int, ...]:
        """The blocks that the index owns."""
        return tuple(block.block_id for block in self._by_key.values() if not block.used)

    def lookup(self, root: Key, token_ids: Sequence[int], block_size: int, max_blocks: int) -> list[int]:
        """The cached blocks at the head of a prompt, at most ``max_blocks``. Changes nothing."""
        found: list[int] = []
        parent = root
        for index in range(max_blocks):
            tokens = tuple(token_ids[index * block_size : (index + 1) * block_size])
            block = self._by_key.get(self.make_key(parent, tokens))
            if block is None or block.token_ids != tokens or block.parent != parent:
                break
            found.append(block.block_id)
            parent = block.key
        return found

    def num_unused(self, block_ids: Iterable[int]) -> int:
        """How many of these cached blocks no sequence uses."""
        return sum(not self._by_block[block_id].used for block_id in block_ids)

    def keys_of(self, block_ids: Iterable[int]) -> list[Key]:
        """The keys of cached blocks."""
        return [self._by_block[block_id].key for block_id in block_ids]

    def publish(self, block_id: int, parent: Key, token_ids: Sequence[int]) -> Key:
        """Make a sequence's full block findable, unless the same content is already; returns its key."""
        key = self.make_key(parent, token_ids)
        if key not in self._by_key:
            self._clock += 1
            block = CachedBlock(block_id, key, parent, tuple(token_ids), last_used=self._clock)
            self._by_key[key] = self._by_block[block_id] = block
        return key

    def acquire(self, block_ids: Iterable[int]) -> None:
        """A sequence takes cached blocks into its table."""
        for block_id in block_ids:
            block = self._by_block[block_id]
            if not block.used:
                block.used = True
                self._unused -= 1
                self._leave_parent(block)

    def release(self, block_id: int) -> bool:
        """The last sequence that used a block let it go. True: the index keeps it. False: it is not cached."""
        block = self._by_block.get(block_id)
        if block is None:
            return False
        self._clock += 1
        block.used, block.last_used = False, self._clock
        self._unused += 1
        parent = self._by_key.get(block.parent)
        if parent is not None:
            parent.unused_children += 1
            block.counted_in = parent
        self._offer(block)
        return True

    def evict(self, count: int) -> list[int]:
        """Forget ``count`` unused blocks and give them back: least recently used first, children before parents."""
        assert count <= self._unused, f"{count} blocks asked for, {self._unused} can be evicted"
        evicted: list[int] = []
        while len(evicted) < count:
            last_used, block_id = heapq.heappop(self._heap)
            block = self._by_block.get(block_id)
            if block is None or block.used or block.unused_children or block.last_used != last_used:
                continue
            self._forget(block)
            evicted.append(block_id)
        self.stats.evictions += len(evicted)
        return evicted

    def reset(self) -> list[int]:
        """Forget everything; returns the unused blocks, which go back to the pool."""
        unused = list(self.unused_ids)
        self._by_key, self._by_block, self._heap, self._unused = {}, {}, [], 0
        return unused

    def _forget(self, block: CachedBlock) -> None:
        del self._by_key[block.key], self._by_block[block.block_id]
        self._unused -= 1
        self._leave_parent(block)

    def _leave_parent(self, block: CachedBlock) -> None:
        parent, block.counted_in = block.counted_in, None
        if parent is not None:
            parent.unused_children -= 1
            self._offer(parent)

    def _offer(self, block: CachedBlock) -> None:
        if block.used or block.unused_children:
            return
        heapq.heappush(self._heap, (block.last_used, block.block_id))
        if len(self._heap) > 2 * self._unused + 64:  # most of it is stale: hits without evictions
            self._heap = [(b.last_used, b.block_id) for b in self._by_key.values() if not b.used and not b.unused_children]
            heapq.heapify(self._heap)
