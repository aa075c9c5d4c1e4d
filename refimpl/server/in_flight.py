"""InFlight: the requests that are being answered, and what may end one from outside: time, the client, the server's end.

Each is a task. Whoever ends one says why, and cancels it; where the task gives way, the reason is raised in place of the
cancellation (as :func:`asyncio.timeout` does it). So generating code needs to know of none of this: it is cancelled.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

from refimpl.server.errors import ApiError


def timed_out(seconds: float) -> ApiError:
    """What ends an answer that took too long."""
    return ApiError(504, f"the answer took longer than {seconds:g} s, this server's limit", code="timeout")


class Answer:
    """One request that is being answered, as a context: ``async with in_flight.answer(timeout) as answer``."""

    def __init__(self, owner: InFlight, timeout: float) -> None:
        self._owner = owner
        self._timeout = timeout
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[object] | None = None
        self._reason: Exception | None = None

    def end(self, reason: Exception) -> None:
        """Raise ``reason`` where the task waits. Only the first reason counts."""
        if self._reason is None and self._task is not None:
            self._reason = reason
            self._task.cancel()

    async def __aenter__(self) -> Self:
        self._owner.check_open()
        self._task = asyncio.current_task()
        self._owner.add(self)
        if self._timeout:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._timeout, lambda: self.end(timed_out(self._timeout)))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._owner.remove(self)
        if self._timer is not None:
            self._timer.cancel()
        task, self._task = self._task, None
        if (
            self._reason is not None
            and task is not None
            and task.uncancel() == 0
            and isinstance(error, asyncio.CancelledError)
        ):
            raise self._reason from None


class InFlight:
    """All answers under way. Once it is closed, none begins."""

    def __init__(self) -> None:
        self._answers: set[Answer] = set()
        self._closed_because: Exception | None = None
        self._empty = asyncio.Event()
        self._empty.set()

    def __len__(self) -> int:
        return len(self._answers)

    def answer(self, timeout: float) -> Answer:
        """A further one, which may take so many seconds (0: any time)."""
        return Answer(self, timeout)

    def add(self, answer: Answer) -> None:
        """It began."""
        self._answers.add(answer)
        self._empty.clear()

    def remove(self, answer: Answer) -> None:
        """It is over."""
        self._answers.discard(answer)
        if not self._answers:
            self._empty.set()

    def check_open(self) -> None:
        """See that answers may begin; raises what :meth:`close` was given."""
        if self._closed_because is not None:
            raise self._closed_because.with_traceback(None)

    @property
    def closed(self) -> bool:
        """Whether no further answer begins."""
        return self._closed_because is not None

    def close(self, reason: Exception) -> None:
        """Let no further answer begin; those under way go on."""
        self._closed_because = reason

    def end_all(self, reason: Exception) -> None:
        """End all that are under way."""
        for answer in list(self._answers):
            answer.end(reason)
