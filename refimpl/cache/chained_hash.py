"""ChainedHash: the prefix index of vLLM's kind. One hash stands for a whole prefix, since each is made over the one before.

Kwon et al. 2023 (PagedAttention) share prefixes by block; keys chained over blocks are vLLM's automatic prefix caching.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

_ROOT_SALTED, _ROOT_PLAIN = b"refimpl salt", b"refimpl root"


def root_key(salt: str | None, tag: str = "") -> bytes:
    """The parent of a first block. Salt and tag (an adapter's name, say) are kept apart: each gives its own chain."""
    person = _ROOT_PLAIN if salt is None else _ROOT_SALTED
    digest = hashlib.blake2b(digest_size=16, person=person)
    for part in (salt or "", tag):
        encoded = part.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return digest.digest()


def block_key(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The key of a full block after the prefix that ``parent`` stands for."""
    digest = hashlib.blake2b(parent, digest_size=16, person=b"refimpl blk")
    digest.update(b"".join(token.to_bytes(4, "little") for token in token_ids))
    return digest.digest()


@dataclass(eq=False)
class _Entry:
    """A cached block as the index knows it."""

    block_id: int
    key: bytes
    parent: bytes
    token_ids: tuple[int, ...]
    used: bool = True
    last_used: int = 0
    unused_children: int = 0
    """Cached blocks right behind it that no sequence uses: they go first."""
    counted_in: _Entry | None = None
    """The parent whose ``unused_children`` counts this block."""


@dataclass
class ChainedHash:
    """By a hash over the parent's key and the block's own tokens; the keys are the same in every process.

    A key alone is not believed: parent and tokens are compared. The least recently used block is forgotten first, and of one
    chain the last, so that what stays can still be reached from its beginning. ``make_key`` can be replaced, to test what
    happens when keys collide.
    """

    name: str = "chained_hash"
    make_key: Callable[[bytes, Sequence[int]], bytes] = block_key
    _by_key: dict[bytes, _Entry] = field(default_factory=dict)
    _by_block: dict[int, _Entry] = field(default_factory=dict)
    _unused: int = 0
    _heap: list[tuple[int, int]] = field(default_factory=list)
    """(last used, block id) of unused blocks without unused children; stale entries are skipped."""
    _clock: int = 0

    def root(self, salt: str | None) -> bytes:
        """The root of the salt's chain."""
        return root_key(salt)

    def lookup(self, root: Any, token_ids: Sequence[int], block_size: int, max_blocks: int) -> list[int]:
        """Key by key from the root, until one is missing."""
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

    def publish(self, block_id: int, parent: Any, token_ids: Sequence[int]) -> bytes:
        """Under the key of parent and tokens, unless that is taken."""
        key = self.make_key(parent, token_ids)
        if key not in self._by_key:
            self._clock += 1
            block = _Entry(block_id, key, parent, tuple(token_ids), last_used=self._clock)
            self._by_key[key] = self._by_block[block_id] = block
        return key

    def acquire(self, block_id: int) -> None:
        """It cannot be forgotten now, and its parent waits for it no more."""
        block = self._by_block[block_id]
        block.used = True
        self._unused -= 1
        self._leave_parent(block)

    def release(self, block_id: int) -> None:
        """It was used just now; its parent may be forgotten only after it."""
        block = self._by_block[block_id]
        self._clock += 1
        block.used, block.last_used = False, self._clock
        self._unused += 1
        parent = self._by_key.get(block.parent)
        if parent is not None:
            parent.unused_children += 1
            block.counted_in = parent
        self._offer(block)

    def evict(self, count: int) -> list[int]:
        """Least recently used first, children before parents. O(log n) a block."""
        evicted: list[int] = []
        while len(evicted) < count:
            last_used, block_id = heapq.heappop(self._heap)
            block = self._by_block.get(block_id)
            if block is None or block.used or block.unused_children or block.last_used != last_used:
                continue
            del self._by_key[block.key], self._by_block[block_id]
            self._unused -= 1
            self._leave_parent(block)
            evicted.append(block_id)
        return evicted

    def reset(self) -> None:
        """Forget everything; the clock goes on."""
        self._by_key, self._by_block, self._heap, self._unused = {}, {}, [], 0

    def _leave_parent(self, block: _Entry) -> None:
        parent, block.counted_in = block.counted_in, None
        if parent is not None:
            parent.unused_children -= 1
            self._offer(parent)

    def _offer(self, block: _Entry) -> None:
        if block.used or block.unused_children:
            return
        heapq.heappush(self._heap, (block.last_used, block.block_id))
        if len(self._heap) > 2 * self._unused + 64:  # most of it is stale: hits without evictions
            self._heap = [(b.last_used, b.block_id) for b in self._by_key.values() if not b.used and not b.unused_children]
            heapq.heapify(self._heap)
