"""Door: what every request passes, as ASGI: its id, who may come in, errors as bodies, and a line in the access log."""

from __future__ import annotations

import hashlib
import logging
import re
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from refimpl.server.errors import ApiError, ClientGoneError
from refimpl.server.keys import given_key

access_log = logging.getLogger("refimpl.server.access")
log = logging.getLogger("refimpl.server")

OPEN_PATHS = ("/health", "/ready", "/version")
"""Asked by whoever watches over processes; they say nothing of anybody's requests, and need no key."""
UI = "/ui"
"""A browser sends no key with an address. What needs one there (texts) asks for it itself."""
QUIET_PATHS = ("/health", "/ready", "/metrics")
"""Asked every few seconds: logged at DEBUG."""
CLIENT_CLOSED_REQUEST = 499
"""nginx's status for it, in the access log alone."""
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")


@dataclass
class Visit:
    """One HTTP request on its way, with what the access log says of it in the end."""

    request_id: str
    method: str
    path: str
    client: str
    tenant: str | None = None
    """Whose cached prefixes it may share, where several keys are known."""
    status: int = 0
    began: float = field(default_factory=time.monotonic)
    told: dict[str, Any] = field(default_factory=dict)
    """Further figures: tokens, seconds to the first, …. Never texts."""

    def line(self) -> str:
        """One JSON object."""
        seconds = round(time.monotonic() - self.began, 6)
        entry = {
            "time": round(time.time(), 3),
            "request_id": self.request_id,
            "client": self.client,
            "method": self.method,
            "path": self.path,
            "status": self.status,
            "seconds": seconds,
            **self.told,
        }
        return msgspec.json.encode(entry).decode()


@dataclass(frozen=True)
class DoorRules:
    """Who may come in."""

    api_keys: tuple[str, ...] = ()
    """Any of them; without any, everybody may."""
    hosts: tuple[str, ...] = ()
    """Names that a Host header may have; empty: any. A page of a stranger whose name was pointed at this address
    (DNS rebinding) has another."""
    origins: tuple[str, ...] = ()
    """Origins of other web pages that may ask; "*": all."""


class Door:
    """The outermost part of the app. Errors that are raised behind it are answered here, unless an answer has begun."""

    def __init__(self, app: ASGIApp, rules: DoorRules) -> None:
        self._app = app
        self._rules = rules
        self._tenants = {key: hashlib.blake2b(key.encode(), digest_size=16).hexdigest() for key in rules.api_keys}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or answer it here."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        visit = _visit(scope, headers)
        scope["refimpl.visit"] = visit
        marks = [(b"x-request-id", visit.request_id.encode())]

        async def marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                visit.status = message["status"]
                message["headers"] = [*message.get("headers", ()), *marks]
            await send(message)

        try:
            marks += self._check_host_and_origin(headers)
            if visit.method == "OPTIONS" and b"access-control-request-method" in headers:
                await _answer_preflight(headers, marked)
                return
            self._check_key(scope, headers, visit)
            await self._app(scope, receive, marked)
        except ClientGoneError:
            visit.status = CLIENT_CLOSED_REQUEST
        except ApiError as error:
            await self._answer(error, visit, marked)
        except Exception:
            log.exception("request %s failed", visit.request_id)
            await self._answer(ApiError(500, "the server failed; its log says why", code="internal_error"), visit, marked)
        finally:
            access_log.log(logging.DEBUG if visit.path in QUIET_PATHS else logging.INFO, "%s", visit.line())

    async def _answer(self, error: ApiError, visit: Visit, send: Send) -> None:
        if visit.status:  # an answer has begun; the connection is closed, which tells the client that it is not whole
            return
        await send_error(error, send)

    def _check_host_and_origin(self, headers: dict[bytes, str]) -> list[tuple[bytes, bytes]]:
        """See that it asks for this server, and not for a stranger's page; returns headers for the answer.

        Raises:
            ApiError: it does not.

        """
        host = _host_name(headers.get(b"host", ""))
        if self._rules.hosts and host not in self._rules.hosts:
            raise ApiError(
                403, f"this server does not answer to the name {host!r}; add it with --allowed-hosts", code="host_refused"
            )
        return self._check_origin(headers)

    def _check_key(self, scope: Scope, headers: dict[bytes, str], visit: Visit) -> None:
        if self._rules.api_keys and not _is_open(scope["path"]):
            visit.tenant = self._tenant(headers)

    def _check_origin(self, headers: dict[bytes, str]) -> list[tuple[bytes, bytes]]:
        origin = headers.get(b"origin")
        if origin is None or _host_name(origin.partition("://")[2]) == _host_name(headers.get(b"host", "")):
            return []
        if "*" in self._rules.origins or origin in self._rules.origins:
            return [(b"access-control-allow-origin", origin.encode("latin-1")), (b"vary", b"Origin")]
        raise ApiError(
            403,
            f"web pages of {origin[:200]} may not ask this server; allow them with --allowed-origins",
            code="origin_refused",
        )

    def _tenant(self, headers: dict[bytes, str]) -> str | None:
        """See that a key is right; whose it is, where there are several."""
        key = given_key(headers.get(b"authorization", ""), self._tenants)
        if key is None:
            raise ApiError(
                401,
                "this server asks for a key: send the header Authorization: Bearer KEY (api_key of OpenAI's client)",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return self._tenants[key] if len(self._tenants) > 1 else None


async def send_error(error: ApiError, send: Send) -> None:
    """An error as a whole answer."""
    body = error.body()
    headers = [(name.lower().encode(), value.encode()) for name, value in error.headers.items()]
    headers += [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if error.status in (408, 413):  # the rest of the body is not read
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _answer_preflight(headers: dict[bytes, str], send: Send) -> None:
    """What a browser asks before it sends JSON, or a key, for a page of an allowed origin."""
    asked = headers.get(b"access-control-request-headers", "")
    allowed = [
        (b"access-control-allow-methods", b"GET, POST"),
        (b"access-control-allow-headers", asked.encode("latin-1")),
        (b"access-control-max-age", b"600"),
    ]
    await send({"type": "http.response.start", "status": 204, "headers": allowed})
    await send({"type": "http.response.body", "body": b""})


def _is_open(path: str) -> bool:
    return path in OPEN_PATHS or path == UI or path.startswith(f"{UI}/")


def _visit(scope: Scope, headers: dict[bytes, str]) -> Visit:
    given = headers.get(b"x-request-id", "")
    request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
    client = scope.get("client")
    return Visit(request_id, scope["method"], scope["path"], f"{client[0]}:{client[1]}" if client else "")


def _host_name(host: str) -> str:
    """The name or address in a Host header, without its port."""
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    return name.lower().rstrip(".")
