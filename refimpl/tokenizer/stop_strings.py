"""Stop strings: found in a text as it grows, wherever its tokens begin and end.

All stop strings of a request are one automaton (Aho and Corasick, "Efficient string matching", 1975): a node for each of
their beginnings, and from each node a way to the longest beginning that the text still ends with when the next character
does not fit. So each character of a text is looked at once, whatever the number and the lengths of the stop strings.
"""

from __future__ import annotations

import functools
from collections import deque


class Node:
    """The text ends with the first ``depth`` characters of a stop string, and with no longer beginning of one."""

    __slots__ = ("children", "depth", "fallback", "found", "held")

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.children: dict[str, Node] = {}
        self.fallback: Node = self
        """The node of the longest beginning that this one ends with; the root's is itself."""
        self.found: int | None = None
        """Which stop string is complete here: the first in the list of those that the text ends with."""
        self.held = 0
        """Characters at the end of the text that could still become a stop string."""

    def after(self, char: str) -> Node:
        """Where the text is when this character follows. Over a text, O(1) a character."""
        node = self
        while (child := node.children.get(char)) is None:
            if node is node.fallback:
                return node
            node = node.fallback
        return child


@functools.lru_cache(maxsize=256)
def automaton(stop: tuple[str, ...]) -> Node:
    """The root of the automaton of these stop strings, none of them empty."""
    root = Node(0)
    for number, text in enumerate(stop):
        node = root
        for depth, char in enumerate(text, start=1):
            node = node.children.setdefault(char, Node(depth))
        node.found = number if node.found is None else node.found
    queue = deque((root, char, child) for char, child in root.children.items())
    while queue:  # by depth: a node's fallback is done before it
        parent, char, node = queue.popleft()
        node.fallback = root if parent is root else parent.fallback.after(char)
        if node.fallback.found is not None:
            node.found = node.fallback.found if node.found is None else min(node.found, node.fallback.found)
        node.held = node.depth if node.children else node.fallback.held
        queue.extend((node, char, child) for char, child in node.children.items())
    return root


class StopFinder:
    """Watches one text for stop strings, and holds back its end while that could still become one.

    The stop string that is complete first counts; of those that are complete with the same character, the first in the
    list (vLLM's rule for one token, and here for each character: what is found does not depend on the tokens).
    """

    def __init__(self, stop: tuple[str, ...], include_in_output: bool) -> None:
        self._stop = stop
        self._include_in_output = include_in_output
        self._root = self._node = automaton(stop)
        self._held = ""
        self.found: str | None = None
        """The stop string that ended the text. What is appended after it is dropped."""

    def append(self, piece: str, counts: bool = True) -> str:
        """Take the next piece of the text; returns what can be said now.

        Without ``counts``, stop strings that this piece completes are passed over.
        """
        if self.found is not None:
            return ""
        node, text = self._node, self._held + piece
        if node is self._root and node.children.keys().isdisjoint(piece):
            return piece
        for end, char in enumerate(piece, start=len(self._held) + 1):
            node = node.after(char)
            if counts and node.found is not None:
                self.found, self._held = self._stop[node.found], ""
                return text[: end if self._include_in_output else end - len(self.found)]
        self._node = node
        said = len(text) - node.held
        self._held = text[said:]
        return text[:said]

    def finish(self) -> str:
        """The text ends here: what was held back."""
        held, self._held, self._node = self._held, "", self._root
        return held
