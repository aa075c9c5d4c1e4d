"""Runner: uvicorn with the app: from a socket that is taken early to an end that lets answers finish."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from refimpl.errors import ConfigError
from refimpl.server.service import Service


@dataclass(frozen=True)
class Listening:
    """Where and how a server listens."""

    host: str = "127.0.0.1"
    port: int = 8000
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    shutdown_timeout: float = 30.0
    """Seconds in which answers may finish once the server is told to end."""

    def bind(self) -> socket.socket:
        """The socket, bound and not yet listening: a port that is taken is known before a model is loaded.

        Raises:
            ConfigError: host or port cannot be had.

        """
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        # Named, as asyncio sets TCP_NODELAY on connections of this protocol alone: without it, the first token waits for
        # the client to acknowledge the headers, which takes 40 ms.
        found = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            found.bind((self.host, self.port))
        except OSError as error:
            found.close()
            raise ConfigError(
                f"{self.host}:{self.port} cannot be listened on: {error.strerror or error}; choose another --host or --port"
            ) from None
        return found

    def check_certificate(self) -> None:
        """See that certificate and key can be used, before a model is loaded.

        Raises:
            ConfigError: one cannot be read, is locked, or they do not belong together.

        """
        certificate, key = self.ssl_certfile, self.ssl_keyfile
        if certificate is None or key is None:
            return
        for flag, name in (("--ssl-certfile", certificate), ("--ssl-keyfile", key)):
            try:
                Path(name).read_bytes()
            except OSError as error:
                raise ConfigError(f"{flag} {name} cannot be read: {error.strerror or error}") from None

        def locked() -> str:  # else OpenSSL would ask at the terminal
            raise ConfigError(f"--ssl-keyfile {key} is locked by a pass phrase; give a key without one")

        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, locked)
        except ssl.SSLError as error:
            why = error.reason.lower().replace("_", " ") if error.reason else "one of them holds none in PEM"
            raise ConfigError(
                f"--ssl-certfile {certificate} and --ssl-keyfile {key} are no certificate and its key: {why}"
            ) from None

    def url(self, bound: socket.socket) -> str:
        """The address for clients."""
        host, port = bound.getsockname()[:2]
        shown = "localhost" if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host  # noqa: S104
        return f"{'https' if self.ssl_certfile else 'http'}://{shown}:{port}"


class Runner(uvicorn.Server):
    """Runs an app. SIGTERM and Ctrl-C let answers finish within ``shutdown_timeout``, then end them; a second one does at
    once.
    """

    def __init__(self, app: FastAPI, service: Service, listening: Listening, ready: Callable[[], None]) -> None:
        header_timeout = service.limits.body_timeout
        super().__init__(
            uvicorn.Config(
                app,
                http=_with_header_timeout(AutoHTTPProtocol, header_timeout),
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                ssl_certfile=listening.ssl_certfile,
                ssl_keyfile=listening.ssl_keyfile,
                timeout_graceful_shutdown=int(listening.shutdown_timeout) + 10,
            )
        )
        self._service = service
        self._shutdown_timeout = listening.shutdown_timeout
        self._ready = ready
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and say so."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        if self.started:
            self._ready()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """While it runs, the signals that end a process end this server. They are not raised again after it."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal came."""
        self.stop()

    def stop(self) -> None:
        """Let answers finish and end; at once, if it is said again. Any thread may call this."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # it has ended
                self._loop.call_soon_threadsafe(self._drain, 0.0 if self.should_exit else self._shutdown_timeout)
        self.should_exit = True

    def _drain(self, seconds: float) -> None:
        self._service.drain()
        asyncio.get_running_loop().call_later(seconds, self._service.end_all)


def _with_header_timeout(base: type[Any], seconds: float) -> type[Any]:
    """Uvicorn's protocol, but that a connection is closed on which a request does not get complete headers in time."""

    class HeaderTimeout(base):  # type: ignore[misc]
        """Closes connections that say nothing, or too slowly."""

        _silence: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._wait()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self._between_requests():
                self._wait()
            else:
                self._stop_waiting()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_waiting()
            super().connection_lost(exc)

        def _between_requests(self) -> bool:
            return self.cycle is None or self.cycle.response_complete

        def _wait(self) -> None:
            if self._silence is None:
                self._silence = self.loop.call_later(seconds, self._close_if_silent)

        def _stop_waiting(self) -> None:
            if self._silence is not None:
                self._silence.cancel()
                self._silence = None

        def _close_if_silent(self) -> None:
            self._silence = None
            if self._between_requests() and not self.transport.is_closing():
                self.transport.close()

    return HeaderTimeout
