"""Exchange: one request that is answered by the engine: its body is read, its client watched, its answer sent."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from fastapi import Response
from starlette.types import Receive, Scope, Send

from refimpl.errors import RefimplError
from refimpl.server.door import Visit
from refimpl.server.errors import ApiError, ClientGoneError, bad_request, of_engine
from refimpl.server.in_flight import Answer
from refimpl.server.limits import Limits
from refimpl.server.service import Service

log = logging.getLogger("refimpl.server")

DONE = b"data: [DONE]\n\n"
LAST_WORDS = 5.0
"""Seconds in which a client must take the error that ends its stream."""
STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would collect the events
]


class Exchange:
    """What an endpoint has of its client: the body that came, and the ways to answer."""

    def __init__(self, body: bytes, visit: Visit, send: Send) -> None:
        self.body = body
        self.visit = visit
        self.headers: dict[str, str] = {}
        """Further headers of the answer."""
        self.streams = False
        """Whether an answer of events has begun."""
        self._send = send

    async def reply(self, body: bytes) -> None:
        """Send the whole answer, JSON."""
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *self._more()]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})

    async def events(self, data: bytes, last: bool = False) -> None:
        """Send events. Waits while the client reads slower than it is told; what it is then told of is merged."""
        if not self.streams:
            self.streams = True
            self.visit.told["ttft"] = round(time.monotonic() - self.visit.began, 6)
            headers = [*STREAM_HEADERS, *self._more()]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._send({"type": "http.response.body", "body": data, "more_body": not last})

    async def fail(self, error: ApiError) -> None:
        """End a stream with an error, as OpenAI's clients raise it."""
        self.visit.told["error"] = error.code
        await self.events(b"data: " + error.body() + b"\n\n" + DONE, last=True)

    def _more(self) -> list[tuple[bytes, bytes]]:
        return [(name.lower().encode(), value.encode("latin-1")) for name, value in self.headers.items()]


Endpoint = Callable[[Service, Exchange], Awaitable[None]]


class Answering(Response):
    """The response of a route that the engine answers; it runs when it is sent."""

    def __init__(self, service: Service, endpoint: Endpoint) -> None:
        super().__init__()
        self._service = service
        self._endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the body, generate, send; whoever leaves meanwhile ends it, and gets no answer.

        Raises:
            ApiError: there is no answer but this one.
            ClientGoneError: the client left.

        """
        service, visit = self._service, scope["refimpl.visit"]
        exchange = Exchange(await read_body(scope, receive, service.limits), visit, send)
        try:
            async with service.in_flight.answer(service.limits.request_timeout) as answer:
                watch = asyncio.create_task(_watch(receive, answer))
                try:
                    service.check_alive()
                    await self._endpoint(service, exchange)
                finally:
                    watch.cancel()
        except ClientGoneError:
            raise
        except Exception as error:
            await _fail(exchange, error)


async def _fail(exchange: Exchange, error: Exception) -> None:
    """Answer with an error: within the stream, where one has begun."""
    if isinstance(error, RefimplError):
        error = of_engine(error)
    if not exchange.streams:
        raise error
    if not isinstance(error, ApiError):
        log.error("request %s failed in its stream", exchange.visit.request_id, exc_info=error)
        error = ApiError(500, "the server failed; its log says why", code="internal_error")
    try:
        await asyncio.wait_for(exchange.fail(error), LAST_WORDS)
    except TimeoutError:
        raise ClientGoneError from None  # it does not read


async def _watch(receive: Receive, answer: Answer) -> None:
    """Wait until the client leaves."""
    while (await receive())["type"] != "http.disconnect":
        pass
    answer.end(ClientGoneError())


async def read_body(scope: Scope, receive: Receive, limits: Limits) -> bytes:
    """The body of a request, JSON by its header.

    Raises:
        ApiError: it is too large, comes too slowly, or is no JSON.
        ClientGoneError: the client left before it was there.

    """
    headers = dict(scope["headers"])
    kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    if kind != b"application/json":  # a browser asks before it sends this to a stranger; it does not for a form
        raise ApiError(415, "send JSON with the header Content-Type: application/json", code="unsupported_media_type")
    length = headers.get(b"content-length", b"0")
    if length.isdigit() and int(length) > limits.max_body_bytes:
        raise limits.too_large()
    try:
        async with asyncio.timeout(limits.body_timeout):
            return await _collect(receive, limits)
    except TimeoutError:
        raise ApiError(
            408, f"the body did not arrive within {limits.body_timeout:g} s, this server's limit", code="body_timeout"
        ) from None


async def _collect(receive: Receive, limits: Limits) -> bytes:
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > limits.max_body_bytes:
            raise limits.too_large()
        if not message.get("more_body", False):
            break
    body = b"".join(parts)
    if not body:
        raise bad_request("the body is empty; send a JSON object", code="invalid_json")
    return body
