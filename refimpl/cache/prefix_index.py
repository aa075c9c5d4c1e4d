"""Prefix indexes: which cached blocks begin a prompt, and which are forgotten first. Given as ``prefix_index``.

A block's key stands for the whole prefix up to it: the chain of keys begins with the request's salt. The prefix cache
(:mod:`refimpl.cache.prefix_cache`) keeps the books and checks each answer of an index.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol, runtime_checkable

from refimpl.cache.chained_hash import ChainedHash
from refimpl.cache.token_tree import TokenTree
from refimpl.errors import ConfigError

Key = Hashable


@runtime_checkable
class PrefixIndex(Protocol):
    """What the prefix cache asks. Subclass :class:`ChainedHash` to change one answer only."""

    name: str

    def root(self, salt: str | None) -> Key:
        """The key before a first block; each salt has its own."""

    def lookup(self, root: Key, token_ids: Sequence[int], block_size: int, max_blocks: int) -> Sequence[int]:
        """The cached blocks at the head of a prompt, at most ``max_blocks``. Changes nothing."""

    def publish(self, block_id: int, parent: Key, token_ids: Sequence[int]) -> Key:
        """A block, in use, is full with these tokens after the prefix of ``parent``. Returns the key of what it holds.

        Where that is cached already, the block that was there first stays, and this one is not taken in.
        """

    def acquire(self, block_id: int) -> None:
        """A cached block that no sequence used is used."""

    def release(self, block_id: int) -> None:
        """The last sequence that used a cached block let it go."""

    def evict(self, count: int) -> Sequence[int]:
        """Forget ``count`` cached blocks that no sequence uses, and name them."""

    def reset(self) -> None:
        """Forget everything. Called too when an engine begins."""


BY_NAME: dict[str, Callable[[], PrefixIndex]] = {"chained_hash": ChainedHash, "token_tree": TokenTree}


def choose_index(given: Any) -> PrefixIndex:
    """The index of a name, the object itself, or a new one of a class.

    Raises:
        ConfigError: no index has that name, or the object lacks a part.

    """
    if isinstance(given, str):
        if given not in BY_NAME:
            raise ConfigError(f"prefix_index is {given!r}; it must be one of {', '.join(BY_NAME)}, or a PrefixIndex object")
        return BY_NAME[given]()
    index = given() if isinstance(given, type) else given
    if not isinstance(index, PrefixIndex):
        raise ConfigError(
            f"prefix_index is a {type(index).__name__}; a PrefixIndex has name, root, lookup, publish, acquire, release, "
            "evict and reset (subclass ChainedHash to change one of them)"
        )
    return index
