"""A lean HTTP/1.1 client for streams: what came, and at what moment it came.

A load generator reads tens of thousands of small chunks a second in one thread, and what it spends on each is what it cannot
tell apart from the server's delay. Here a chunk is noted and read in the very call in which the event loop receives it; no
task is woken before the end. It does what a load generator needs: POST and GET, connections that are kept open, TLS, bodies
of a given length, in chunks, or up to the connection's end. It follows no redirect and asks no proxy.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from urllib.parse import SplitResult, urlsplit

LONGEST_HEAD = 64 * 1024
"""Bytes of a status line and headers."""


class HttpError(Exception):
    """Something went wrong between here and the server; ``kind`` is connect, timeout, disconnected or protocol."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class GoneError(Exception):
    """The connection was closed before a byte of an answer came."""


Take = Callable[[float, bytes], object]
"""Takes content and the moment at which it came."""
Listener = Callable[[float, "bytes | None"], bool]
"""Takes what came on a connection, None at its end; whether it has heard enough."""


class Chunks:
    """Takes the chunked transfer coding off a body (RFC 9112, section 7.1)."""

    def __init__(self) -> None:
        self._buffer = b""
        self._left = 0
        """Bytes of the chunk at hand, its line end included."""
        self.done = False

    def feed(self, data: bytes) -> bytes:
        """The content in what came.

        Raises:
            HttpError: it is no chunked body.

        """
        buffer, content, at = self._buffer + data, [], 0
        while not self.done:
            if self._left:
                piece = buffer[at : at + self._left]
                content.append(piece[: max(0, self._left - 2)])
                at, self._left = at + len(piece), self._left - len(piece)
                if self._left:
                    break
                continue
            end = buffer.find(b"\r\n", at)
            if end < 0:
                break
            line, at = buffer[at:end].partition(b";")[0], end + 2
            try:
                size = int(line, 16)
            except ValueError as error:
                raise HttpError("protocol", f"{line[:40]!r} is no chunk's size") from error
            self.done, self._left = size == 0, size + 2 if size else 0
        self._buffer = buffer[at:]
        return b"".join(content)


@dataclass
class Head:
    """A response's status and headers, names in lower case."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, data: bytes) -> Head:
        """From the bytes up to the empty line.

        Raises:
            HttpError: they are no HTTP/1 response.

        """
        first, *lines = data.decode("latin-1").split("\r\n")
        version, _, rest = first.partition(" ")
        if not version.startswith("HTTP/1.") or not rest[:3].isdecimal():
            raise HttpError("protocol", f"{first[:100]!r} is no HTTP/1.1 response")
        named = (line.partition(":") for line in lines)
        return cls(int(rest[:3]), {name.strip().lower(): value.strip() for name, _, value in named})


class Body:
    """The body of a response: its content, and where it ends."""

    def __init__(self, headers: dict[str, str]) -> None:
        self._chunks = Chunks() if headers.get("transfer-encoding", "").lower() == "chunked" else None
        length = headers.get("content-length", "")
        self._left = int(length) if self._chunks is None and length.isdecimal() else None

    @property
    def done(self) -> bool:
        """Whether all of it came. One that ends with its connection never says so."""
        return self._chunks.done if self._chunks is not None else self._left == 0

    def feed(self, data: bytes) -> bytes:
        """The content in what came."""
        if self._chunks is not None:
            return self._chunks.feed(data)
        if self._left is not None:
            self._left -= len(data)
        return data

    def end(self) -> None:
        """The connection ended.

        Raises:
            HttpError: in the middle of it.

        """
        if self._chunks is not None or self._left is not None:
            raise HttpError("disconnected", "the connection ended in the middle of a body")


class Connection(asyncio.Protocol):
    """One connection. What comes goes to whoever listens, with its moment."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._listener: Listener | None = None
        self._over: asyncio.Future[None] | None = None
        self._heard = 0.0
        self.transport: asyncio.Transport | None = None
        self.closed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It is there."""
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        """Bytes came."""
        self._heard = now = self._clock()
        self._tell(now, data)

    def connection_lost(self, exc: Exception | None) -> None:
        """It is gone."""
        self.closed = True
        self._tell(self._clock(), None)

    def _tell(self, now: float, data: bytes | None) -> None:
        over = self._over
        if self._listener is None or over is None or over.done():
            if data is not None:
                self.close()  # bytes that nobody asked for
            return
        try:
            if self._listener(now, data):
                over.set_result(None)
        except (HttpError, GoneError) as error:
            over.set_exception(error)

    async def listen(self, listener: Listener, timeout: float, data: bytes) -> None:
        """Send ``data``, and hand over what comes until the listener says that it is enough.

        Raises:
            HttpError: nothing came for ``timeout`` seconds, or the listener raised it.

        """
        assert self.transport is not None
        loop = asyncio.get_running_loop()
        self._listener, self._over, self._heard = listener, loop.create_future(), self._clock()
        self._timer = loop.call_later(timeout, self._look, timeout)
        try:
            if self.closed:
                self._tell(self._heard, None)
            else:
                self.transport.write(data)
            await self._over
        finally:
            self._timer.cancel()
            self._listener = None

    def _look(self, timeout: float) -> None:
        """Has it been silent for too long?"""
        silent = self._clock() - self._heard
        if self._over is None or self._over.done():
            return
        if silent >= timeout:
            self._over.set_exception(HttpError("timeout", f"nothing came for {timeout:g} s"))
        else:
            self._timer = asyncio.get_running_loop().call_later(timeout - silent, self._look, timeout)

    def close(self) -> None:
        """Close it."""
        if self.transport is not None:
            self.transport.close()


class Exchange:
    """One request and its response, as a connection's listener."""

    def __init__(self, started: Callable[[Head], Take]) -> None:
        self._started = started
        self._buffer = b""
        self._body: Body | None = None
        self._take: Take = lambda _now, _data: None
        self.head: Head | None = None

    @property
    def reusable(self) -> bool:
        """Whether the connection can be used again."""
        whole = self._body is not None and self._body.done and self.head is not None
        return whole and self.head is not None and self.head.headers.get("connection", "").lower() != "close"

    def __call__(self, now: float, data: bytes | None) -> bool:
        """Take what came, None at the connection's end; whether the response is whole."""
        if self._body is None:
            if data is None:
                raise (
                    HttpError("disconnected", "the connection ended in the middle of the headers")
                    if self._buffer
                    else GoneError
                )
            data = self._read_head(data)
            if self._body is None:
                return False
        if data is None:
            self._body.end()
            return True
        if content := self._body.feed(data):
            self._take(now, content)
        return self._body.done

    def _read_head(self, data: bytes) -> bytes:
        """Take bytes of the head; what is left of them belongs to the body."""
        self._buffer += data
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(self._buffer) > LONGEST_HEAD:
                raise HttpError("protocol", f"the headers are longer than {LONGEST_HEAD:,} bytes")
            return b""
        self.head = Head.parse(self._buffer[:end])
        self._body, self._take = Body(self.head.headers), self._started(self.head)
        return self._buffer[end + 4 :]


class HttpClient:
    """Asks one server.

    Args:
        url: scheme, host and port; a path is left out.
        headers: of every request.
        timeout: seconds without a byte until a request is given up.
        clock: of the moments.

    """

    def __init__(self, url: str, headers: dict[str, str], timeout: float, clock: Callable[[], float]) -> None:
        self._url: SplitResult = urlsplit(url)
        host = self._url.netloc.rpartition("@")[2]
        self._head = "".join(f"{name}: {value}\r\n" for name, value in ({"Host": host, "Accept": "*/*"} | headers).items())
        self._timeout = timeout
        self._clock = clock
        self._tls = ssl.create_default_context() if self._url.scheme == "https" else None
        self._idle: list[Connection] = []

    def close(self) -> None:
        """Close the connections that wait."""
        while self._idle:
            self._idle.pop().close()

    async def request(self, method: str, path: str, started: Callable[[Head], Take], body: bytes = b"") -> Head:
        """Send a request and read its response to the end.

        Args:
            method: GET or POST.
            path: with which the request line goes on.
            started: called when the head is there; it gives what takes the body's bytes, each with its moment. What takes
                them may raise an HttpError, which ends the exchange.
            body: JSON.

        Raises:
            HttpError: the server cannot be reached, says nothing for too long, leaves, or speaks no HTTP/1.1.

        """
        typed = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n" if body else ""
        data = f"{method} {path} HTTP/1.1\r\n{self._head}{typed}\r\n".encode("latin-1") + body
        while self._idle:
            connection = self._idle.pop()
            if not connection.closed:
                with contextlib.suppress(GoneError):  # it was closed meanwhile: over another
                    return await self._exchange(connection, data, started)
        try:
            return await self._exchange(await self._connect(), data, started)
        except GoneError:
            raise HttpError("disconnected", "the server closed the connection without an answer") from None

    async def whole(self, method: str, path: str) -> tuple[int, bytes]:
        """Status and body of a short response.

        Raises:
            HttpError: as with :meth:`request`.

        """
        pieces: list[bytes] = []
        head = await self.request(method, path, lambda _: lambda _now, data: pieces.append(data))
        return head.status, b"".join(pieces)

    async def _exchange(self, connection: Connection, data: bytes, started: Callable[[Head], Take]) -> Head:
        exchange = Exchange(started)
        try:
            await connection.listen(exchange, self._timeout, data)
        finally:
            if exchange.reusable and not connection.closed:
                self._idle.append(connection)
            else:
                connection.close()
        assert exchange.head is not None
        return exchange.head

    async def _connect(self) -> Connection:
        host, tls = self._url.hostname or "", self._tls
        port = self._url.port or (443 if tls else 80)
        made = asyncio.get_running_loop().create_connection(lambda: Connection(self._clock), host, port, ssl=tls)
        try:
            _, connection = await asyncio.wait_for(made, min(self._timeout, 30.0))
        except (OSError, TimeoutError) as error:
            raise HttpError("connect", f"{host}:{port}: {error or type(error).__name__}") from error
        return connection
