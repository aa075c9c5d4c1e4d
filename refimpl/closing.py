"""``with`` and ``async with``, for what has to be closed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self


class Closing(ABC):
    """Closed at the end of a ``with`` block."""

    @abstractmethod
    def close(self) -> None:
        """End it. May be called twice."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


class AsyncClosing(Closing):
    """At the end of an ``async with`` block too, which does not hold up the event loop."""

    @abstractmethod
    async def aclose(self) -> None:
        """End it. May be called twice."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.aclose()
