"""A lean HTTP/1.1 client for streams: what came, and at what moment it came.

A load generator reads tens of thousands of small chunks a second in one thread, and notes the time of each. General clients
spend many times as long on a chunk as this one, and then measure themselves. It does what a load generator needs: POST and
GET, connections that are kept open, TLS, bodies of a given length, in chunks, or up to the connection's end. It follows no
redirect and asks no proxy.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from urllib.parse import SplitResult, urlsplit

LONGEST_HEAD = 64 * 1024
"""Bytes of a status line and headers."""


class HttpError(Exception):
    """Something went wrong between here and the server; ``kind`` is connect, timeout, disconnected or protocol."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


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


class Connection(asyncio.Protocol):
    """One connection, and the bytes that came on it, each with its moment."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._came: deque[tuple[float, bytes]] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self.transport: asyncio.Transport | None = None
        self.closed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It is there."""
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        """Bytes came."""
        self._came.append((self._clock(), data))
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        """It is gone."""
        self.closed = True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _give_up(self, error: HttpError) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(error)

    async def read(self, timeout: float) -> tuple[float, bytes] | None:
        """The next bytes and their moment; None at the connection's end.

        Raises:
            HttpError: nothing came for so many seconds.

        """
        if not self._came and not self.closed:
            loop = asyncio.get_running_loop()
            self._waiter = loop.create_future()
            timer = loop.call_later(timeout, self._give_up, HttpError("timeout", f"nothing came for {timeout:g} s"))
            try:
                await self._waiter
            finally:
                timer.cancel()
        return self._came.popleft() if self._came else None

    def close(self) -> None:
        """Close it."""
        if self.transport is not None:
            self.transport.close()


class Response:
    """A response whose head is there; its body comes with :meth:`pieces`."""

    def __init__(self, head: Head, rest: tuple[float, bytes], connection: Connection, timeout: float) -> None:
        self.status, self.headers = head.status, head.headers
        self._rest, self._connection, self._timeout = rest, connection, timeout
        self.whole = False
        """Whether its body was read to its end, and the connection can be used again."""

    async def pieces(self) -> AsyncIterator[tuple[float, bytes]]:
        """The body as it comes: moment and bytes.

        Raises:
            HttpError: it ended early, nothing came for too long, or it is no body.

        """
        chunks = Chunks() if self.headers.get("transfer-encoding", "").lower() == "chunked" else None
        left = int(length) if chunks is None and (length := self.headers.get("content-length", "")).isdecimal() else None
        came: tuple[float, bytes] | None = self._rest
        while came is not None:
            now, data = came
            if chunks is not None:
                data = chunks.feed(data)
            elif left is not None:
                left -= len(data)
            if data:
                yield now, data
            if left == 0 or (chunks is not None and chunks.done):
                self.whole = self.headers.get("connection", "").lower() != "close"
                return
            came = await self._connection.read(self._timeout)
        if chunks is not None or left is not None:
            raise HttpError("disconnected", "the connection ended in the middle of a body")

    async def body(self) -> bytes:
        """All of it."""
        return b"".join([data async for _, data in self.pieces()])


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

    @contextlib.asynccontextmanager
    async def request(self, method: str, path: str, body: bytes = b"") -> AsyncIterator[Response]:
        """Send a request; within the block its response is read.

        Raises:
            HttpError: the server cannot be reached, says nothing for too long, leaves, or speaks no HTTP/1.1.

        """
        typed = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n" if body else ""
        data = f"{method} {path} HTTP/1.1\r\n{self._head}{typed}\r\n".encode("latin-1") + body
        connection, response = await self._send(data)
        try:
            yield response
        finally:
            if response.whole and not connection.closed:
                self._idle.append(connection)
            else:
                connection.close()

    async def _send(self, data: bytes) -> tuple[Connection, Response]:
        """Over a connection that waits, or a new one. One that waited may have been closed meanwhile: then over another."""
        while self._idle:
            connection = self._idle.pop()
            if connection.closed:
                continue
            with contextlib.suppress(_GoneError):
                return connection, await self._exchange(connection, data)
        connection = await self._connect()
        try:
            return connection, await self._exchange(connection, data)
        except _GoneError:
            raise HttpError("disconnected", "the server closed the connection without an answer") from None

    async def _connect(self) -> Connection:
        host, tls = self._url.hostname or "", self._tls
        port = self._url.port or (443 if tls else 80)
        made = asyncio.get_running_loop().create_connection(lambda: Connection(self._clock), host, port, ssl=tls)
        try:
            _, connection = await asyncio.wait_for(made, min(self._timeout, 30.0))
        except (OSError, TimeoutError) as error:
            raise HttpError("connect", f"{host}:{port}: {error or type(error).__name__}") from error
        return connection

    async def _exchange(self, connection: Connection, data: bytes) -> Response:
        assert connection.transport is not None
        try:
            connection.transport.write(data)
            head, now = b"", 0.0
            while (end := head.find(b"\r\n\r\n")) < 0:
                came = await connection.read(self._timeout)
                if came is None:
                    if not head:
                        raise _GoneError
                    raise HttpError("disconnected", "the connection ended in the middle of the headers")
                now, head = came[0], head + came[1]
                if len(head) > LONGEST_HEAD:
                    raise HttpError("protocol", f"the headers are longer than {LONGEST_HEAD:,} bytes")
            return Response(Head.parse(head[:end]), (now, head[end + 4 :]), connection, self._timeout)
        except BaseException:
            connection.close()
            raise


class _GoneError(Exception):
    """The connection was closed before a byte of an answer came."""
