"""PrefixCache: full blocks by what is in them, so that a later prompt with the same beginning computes only the rest.

It owns the cached blocks that no sequence uses: they stay allocated until room is needed. Which blocks begin a prompt, and
which are forgotten first, its index says (:mod:`refimpl.cache.prefix_index`); here are the books, and the checks of what the
index answers.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from refimpl.cache.chained_hash import ChainedHash
from refimpl.cache.prefix_index import Key, PrefixIndex
from refimpl.errors import PrefixIndexError
from refimpl.outputs import CacheChanges


class _Content(NamedTuple):
    """What a cached block holds."""

    key: Key
    parent: Key
    token_ids: tuple[int, ...]


@dataclass
class PrefixCacheStats:
    """Counted in tokens (queries, hits) and blocks (evictions) since the engine began."""

    queries: int = 0
    hits: int = 0
    evictions: int = 0


class PrefixCache:
    """The cached blocks: what each holds, and which of them no sequence uses."""

    def __init__(self, index: PrefixIndex | None = None) -> None:
        self.index: PrefixIndex = index or ChainedHash()
        self.index.reset()  # one that served another engine knows that one's blocks
        self.stats = PrefixCacheStats()
        self._failure: PrefixIndexError | None = None
        self._published: list[int] = []
        self._evicted: list[int] = []
        self.was_reset = False
        self._contents: dict[int, _Content] = {}
        self._keys: set[Key] = set()
        self._unused: set[int] = set()

    def __len__(self) -> int:
        return len(self._contents)

    @property
    def num_evictable(self) -> int:
        """Blocks that ``evict`` could give back: cached, and used by no sequence."""
        return len(self._unused)

    @property
    def unused_ids(self) -> tuple[int, ...]:
        """The blocks that the cache owns."""
        return tuple(self._unused)

    def root(self, salt: str | None) -> Key:
        """The key before a first block."""
        try:
            return self.index.root(salt)
        except Exception as error:
            raise self._raised("root", error) from error

    def lookup(self, root: Key, token_ids: Sequence[int], block_size: int, max_blocks: int) -> list[int]:
        """The cached blocks at the head of a prompt, at most ``max_blocks``. Changes nothing.

        Raises:
            PrefixIndexError: the index named a block that does not hold the prompt's tokens at that place.

        """
        found = self._ask("lookup", root, token_ids, block_size, max_blocks)
        if len(found) > max_blocks:
            self._refuse(f"found {len(found)} blocks for a prompt that may begin with at most {max_blocks} cached ones")
        parent = root
        for place, block_id in enumerate(found):
            content = self._contents.get(block_id)
            tokens = tuple(token_ids[place * block_size : (place + 1) * block_size])
            if content is None or content.token_ids != tokens or content.parent != parent:
                what = "is not cached" if content is None else "holds other tokens, or follows another prefix"
                self._refuse(f"found block {block_id!r} as number {place} of a prompt, but that block {what}")
            else:
                parent = content.key
        return found

    def num_unused(self, block_ids: Iterable[int]) -> int:
        """How many of these cached blocks no sequence uses."""
        return sum(block_id in self._unused for block_id in block_ids)

    def keys_of(self, block_ids: Iterable[int]) -> list[Key]:
        """The keys of cached blocks."""
        return [self._contents[block_id].key for block_id in block_ids]

    def publish(self, block_id: int, parent: Key, token_ids: Sequence[int]) -> Key:
        """Make a sequence's full block findable, unless the same content is already; returns its key."""
        try:
            key = self.index.publish(block_id, parent, token_ids)
            known = key in self._keys
        except Exception as error:
            raise self._raised("publish", error) from error
        if not known:
            self._keys.add(key)
            self._contents[block_id] = _Content(key, parent, tuple(token_ids))
            self._published.append(block_id)
        return key

    def acquire(self, block_ids: Iterable[int]) -> None:
        """A sequence takes cached blocks into its table."""
        for block_id in block_ids:
            if block_id in self._unused:
                self._unused.remove(block_id)
                self._tell(self.index.acquire, block_id)

    def release(self, block_id: int) -> bool:
        """The last sequence that used a block let it go. True: the cache keeps it. False: it is not cached."""
        if block_id not in self._contents:
            return False
        self._unused.add(block_id)
        self._tell(self.index.release, block_id)
        return True

    def evict(self, count: int) -> list[int]:
        """Forget ``count`` unused blocks and give them back.

        Raises:
            PrefixIndexError: the index named other than ``count`` different blocks that are cached and unused.

        """
        assert count <= len(self._unused), f"{count} blocks asked for, {len(self._unused)} can be evicted"
        evicted = self._ask("evict", count)
        if len(evicted) != count or len(set(evicted)) != count:
            self._refuse(f"was to give back {count} different blocks, and gave {evicted}")
        for block_id in evicted:
            if block_id not in self._unused:
                self._refuse(
                    f"gave back block {block_id!r}, which is {'in use' if block_id in self._contents else 'not cached'}"
                )
        for block_id in evicted:
            self._unused.remove(block_id)
            self._keys.remove(self._contents.pop(block_id).key)
        self._evicted += evicted
        self.stats.evictions += count
        return evicted

    def reset(self) -> list[int]:
        """Forget everything; returns the unused blocks, which go back to the pool."""
        unused = list(self._unused)
        self._contents, self._keys, self._unused = {}, set(), set()
        self._published, self._evicted, self.was_reset = [], [], True
        self._failure = None
        self._tell(self.index.reset)
        return unused

    def take_changes(self) -> CacheChanges:
        """What was published, evicted and reset since the last call."""
        changes = CacheChanges(tuple(self._published), tuple(self._evicted), self.was_reset)
        self._published, self._evicted, self.was_reset = [], [], False
        return changes

    def _ask(self, what: str, *arguments: object) -> list[int]:
        """The blocks that the index answers with, as whole numbers."""
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        try:
            return [operator.index(block_id) for block_id in getattr(self.index, what)(*arguments)]
        except Exception as error:
            raise self._raised(what, error) from error

    def _tell(self, method: Callable[..., None], *arguments: int) -> None:
        """Tell the index what happened. If it raises, the next question does: whoever tells is done with its blocks."""
        try:
            method(*arguments)
        except Exception as error:
            self._failure = self._raised(getattr(method, "__name__", "a method"), error)
            self._failure.__cause__ = error

    def _raised(self, what: str, error: Exception) -> PrefixIndexError:
        return PrefixIndexError(f"the prefix index {self.index.name!r} raised {error!r} in {what}")

    def _refuse(self, what: str) -> None:
        raise PrefixIndexError(f"the prefix index {self.index.name!r} {what}; nothing of it is used")
