"""An open loop over a network: requests are sent at their times, however many are still to be answered.

A generator that is late makes a server look slow, so its own lateness is measured too: how long after its time each request
was sent, and how late the event loop wakes up, which is how late it may have read a token.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from refimpl.bench.openai_stream import Answer, Clock

TICK = 0.01
"""Seconds between two looks at the event loop."""


@dataclass(frozen=True)
class Ask:
    """A request, and when it is due: seconds from the start."""

    at: float
    prompt: str | list[int]
    output: int
    """Most tokens of the answer."""


@dataclass
class Outcome:
    """What came of all requests."""

    answers: list[Answer] = field(default_factory=list)
    """In the order of the requests."""
    seconds: float = 0.0
    """From the start to the end of the last answer."""
    sent_late: list[float] = field(default_factory=list)
    """For each request, the seconds between when it could be sent and when it was."""
    waited: list[float] = field(default_factory=list)
    """For each request, the seconds for which it was kept back because as many as allowed were under way."""
    woken_late: list[float] = field(default_factory=list)
    """How late the event loop woke up, every :data:`TICK` seconds."""
    most_in_flight: int = 0


async def drive(
    asks: Sequence[Ask],
    send: Callable[[Ask, float], Awaitable[Answer]],
    clock: Clock,
    max_concurrency: int | None = None,
    ended: Callable[[], object] = lambda: None,
) -> Outcome:
    """Send the requests at their times, and wait for all answers.

    Args:
        asks: in the order of their times.
        send: answers a request; it is given the time at which it was due, and never raises but when it is cancelled.
        clock: seconds.
        max_concurrency: keep requests back while so many are under way; then they wait, and the loop is not open any more.
        ended: called after each answer.

    """
    outcome = Outcome()
    places = asyncio.Semaphore(max_concurrency) if max_concurrency else contextlib.nullcontext()
    in_flight = 0
    start = clock()

    async def one(ask: Ask) -> Answer:
        nonlocal in_flight
        due, asked = start + ask.at, clock()
        async with places:
            waited = clock() - asked if max_concurrency else 0.0
            in_flight += 1
            outcome.most_in_flight = max(outcome.most_in_flight, in_flight)
            try:
                answer = await send(ask, due + waited)
            finally:
                in_flight -= 1
        outcome.waited.append(waited)
        outcome.sent_late.append(max(0.0, answer.sent - answer.due))
        ended()
        return answer

    ticker = asyncio.create_task(_tick(outcome.woken_late, clock))
    try:
        async with asyncio.TaskGroup() as group:
            tasks = []
            for ask in asks:
                if (wait := start + ask.at - clock()) > 0:
                    await asyncio.sleep(wait)
                tasks.append(group.create_task(one(ask)))
    finally:
        ticker.cancel()
    outcome.answers = [task.result() for task in tasks]
    outcome.seconds = max((answer.ended for answer in outcome.answers), default=start) - start
    return outcome


async def _tick(late: list[float], clock: Clock) -> None:
    while True:
        before = clock()
        await asyncio.sleep(TICK)
        late.append(max(0.0, clock() - before - TICK))
