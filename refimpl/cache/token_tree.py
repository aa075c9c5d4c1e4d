"""TokenTree: an example of a prefix index of one's own, a tree of token blocks as in RadixAttention (Zheng et al. 2024)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(eq=False)
class _Node:
    """A block of tokens behind another one; the root of a salt has neither tokens nor block."""

    parent: _Node | None = None
    token_ids: tuple[int, ...] = ()
    block_id: int = 0
    children: dict[tuple[int, ...], _Node] = field(default_factory=dict)
    last_used: int = 0


class TokenTree:
    """A prefix is a path from the root of its salt; nothing is hashed. Evicting looks at every unused node: O(n) a block."""

    name = "token_tree"

    def __init__(self) -> None:
        self._clock = 0
        self.reset()

    def root(self, salt: str | None) -> _Node:
        """A tree for each salt."""
        return self._roots.setdefault(salt, _Node())

    def lookup(self, root: Any, token_ids: Sequence[int], block_size: int, max_blocks: int) -> list[int]:
        """Down the tree as far as it goes."""
        found, node = [], root
        for index in range(max_blocks):
            node = node.children.get(tuple(token_ids[index * block_size : (index + 1) * block_size]))
            if node is None:
                break
            found.append(node.block_id)
        return found

    def publish(self, block_id: int, parent: Any, token_ids: Sequence[int]) -> _Node:
        """A child of the parent's node, unless it has that child."""
        tokens = tuple(token_ids)
        node: _Node | None = parent.children.get(tokens)
        if node is None:
            node = parent.children[tokens] = self._nodes[block_id] = _Node(parent, tokens, block_id)
        return node

    def acquire(self, block_id: int) -> None:
        """It cannot be forgotten now."""
        del self._unused[block_id]

    def release(self, block_id: int) -> None:
        """It was used just now."""
        self._clock += 1
        node = self._unused[block_id] = self._nodes[block_id]
        node.last_used = self._clock

    def evict(self, count: int) -> list[int]:
        """Of the nodes without unused children, the least recently used one; again and again."""
        evicted: list[int] = []
        while len(evicted) < count:
            parents = {id(node.parent) for node in self._unused.values()}
            leaf = min((n for n in self._unused.values() if id(n) not in parents), key=lambda node: node.last_used)
            del self._unused[leaf.block_id], self._nodes[leaf.block_id]
            assert leaf.parent is not None
            del leaf.parent.children[leaf.token_ids]
            evicted.append(leaf.block_id)
        return evicted

    def reset(self) -> None:
        """A new, empty tree."""
        self._roots: dict[str | None, _Node] = {}
        self._nodes: dict[int, _Node] = {}
        self._unused: dict[int, _Node] = {}
