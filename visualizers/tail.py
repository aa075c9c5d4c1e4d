"""Tail: a sequence that forgets its beginning, while what is left keeps its numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar, overload

Item = TypeVar("Item")


class Tail(Sequence[Item]):
    """``len`` counts what was ever appended. What is kept has the indices from ``first`` on; iteration goes over that."""

    def __init__(self, items: Iterable[Item] = (), first: int = 0) -> None:
        self.first = first
        self._kept = list(items)

    def __len__(self) -> int:
        return self.first + len(self._kept)

    def __bool__(self) -> bool:
        return bool(self._kept)

    def __iter__(self) -> Iterator[Item]:
        return iter(self._kept)

    @property
    def num_kept(self) -> int:
        """How many are there to be read."""
        return len(self._kept)

    @overload
    def __getitem__(self, index: int) -> Item: ...
    @overload
    def __getitem__(self, index: slice) -> list[Item]: ...
    def __getitem__(self, index: int | slice) -> Item | list[Item]:
        """One of them, or the kept ones of a stretch."""
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            return self._kept[max(0, start - self.first) : max(0, stop - self.first) : step]
        at = (index + len(self) if index < 0 else index) - self.first
        if not 0 <= at < len(self._kept):
            raise IndexError(f"index {index} is not kept: those from {self.first} to {len(self) - 1} are")
        return self._kept[at]

    def pick(self, indices: Iterable[int]) -> list[Item]:
        """Those with these indices, all of which are kept."""
        kept, first = self._kept, self.first
        return [kept[index - first] for index in indices]

    def append(self, item: Item) -> None:
        """Take one more."""
        self._kept.append(item)

    def forget(self, first: int) -> None:
        """Let go of all before index ``first``."""
        first = min(first, len(self))
        if first > self.first:
            del self._kept[: first - self.first]
            self.first = first
