"""The page at /ui: block map and batch timeline of the engines behind a server, live. It looks, and changes nothing.

========================  =========================================================================
GET /ui                   the page; with scripts and styles beside it. It needs no network but this server
GET /ui/frames?engine=0   what it draws, as server-sent events, for as long as it is open
POST /ui/viewers/ID       a button or a click of that page
========================  =========================================================================

Prompts and answers are other people's. Their texts are sent to whoever has an API key; where the server has none, to viewers
on this machine alone, who did not come through a proxy. All others see the same pictures without texts.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from functools import cache
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse

from refimpl.errors import RefimplError
from refimpl.server.keys import given_key
from refimpl.server.ui_viewers import Hub, TooManyViewersError, Viewer
from refimpl.visualizers import batch_timeline, block_map
from refimpl.visualizers.page import script, style

if TYPE_CHECKING:
    from refimpl.engine import Engine

FIGURES = (block_map.FIGURE, batch_timeline.FIGURE)
ALIVE = 15.0
"""Seconds of silence after which an empty line is sent, so that nobody on the way closes the connection."""
LOOK = 0.5
"""Seconds between two looks at whether the server is about to end."""
MOST_BYTES = 4096
"""Of a page's message."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; connect-src 'self'; img-src data: blob:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
FORWARDED = ("forwarded", "x-forwarded-for", "x-real-ip")
HERE = ("127.0.0.1", "::1")
JAVASCRIPT, STYLES = "text/javascript", "text/css"


def make_router(
    engines: Sequence[Engine], api_keys: Sequence[str] = (), ending: Callable[[], bool] = lambda: False
) -> APIRouter:
    """The routes of the page.

    Args:
        engines: those that can be looked at, by number.
        api_keys: whoever has one of them may read texts.
        ending: whether the server is about to end, and all streams with it.

    Raises:
        RefimplError: an engine keeps no log (``event_log_size=0``), so there is nothing to show.

    """
    hubs = [_hub(engine) for engine in engines]
    router = APIRouter(include_in_schema=False)

    @router.get("/ui")
    def page() -> Response:
        return HTMLResponse(_page(len(hubs)), headers={"Content-Security-Policy": POLICY, "Cache-Control": "no-cache"})

    @router.get("/ui/ui.js")
    def scripts() -> Response:
        return Response(_script(), media_type=JAVASCRIPT, headers={"Cache-Control": "no-cache"})

    @router.get("/ui/ui.css")
    def styles() -> Response:
        return Response(
            f"{style(_names())}\n{_static('ui_page.css')}", media_type=STYLES, headers={"Cache-Control": "no-cache"}
        )

    @router.get("/ui/frames")
    async def frames(request: Request, engine: int = 0) -> Response:
        if not 0 <= engine < len(hubs):
            return _refused(404, f"there is no engine {engine}; they are numbered from 0 to {len(hubs) - 1}")
        hub = hubs[engine]
        try:
            viewer = hub.open(may_read(request, api_keys))
        except TooManyViewersError as error:
            return _refused(503, str(error))
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(_events(hub, viewer, ending), media_type="text/event-stream", headers=headers)

    @router.post("/ui/viewers/{viewer_id}")
    async def message(request: Request, viewer_id: str) -> Response:
        length = request.headers.get("content-length", "")
        if not length.isdecimal() or int(length) > MOST_BYTES:
            return _refused(413, f"a message has {MOST_BYTES} bytes at most, and says how many")
        try:
            said = json.loads(await request.body())
        except ValueError:
            return _refused(400, "a message is a JSON object")
        if not any(hub.tell(viewer_id, said) for hub in hubs):
            return _refused(404, "this page's stream has ended; load it again")
        return Response(status_code=204)

    return router


def may_read(request: Request, api_keys: Sequence[str]) -> bool:
    """Whether texts of prompts and answers may be sent to this client."""
    if api_keys:
        return given_key(request.headers.get("authorization", ""), api_keys) is not None
    here = request.client is not None and request.client.host in HERE
    return here and not any(name in request.headers for name in FORWARDED)


def _hub(engine: Engine) -> Hub:
    if engine.events.records.maxlen == 0:
        raise RefimplError("this engine records nothing (event_log_size=0), so /ui has nothing to show; use --no-ui")
    return Hub(engine.events, FIGURES)


async def _events(hub: Hub, viewer: Viewer, ending: Callable[[], bool]) -> AsyncIterator[str]:
    opening = {"type": "opening", "viewer": viewer.id, "shown": hub.shown, "heading": hub.heading}
    try:
        yield _event(json.dumps(opening | {"texts": viewer.feed.with_texts}))
        while not ending():
            asked, silent = viewer.ask(), 0.0
            hub.nudge()
            while not asked.done() and not ending():
                await asyncio.wait((asked,), timeout=LOOK)
                silent += LOOK
                if silent >= ALIVE:
                    silent = 0.0
                    yield ": still here\n\n"
            for text in asked.result() if asked.done() else ():
                yield _event(text)
    finally:
        hub.close(viewer)


def _event(text: str) -> str:
    return f"data: {text}\n\n"


def _refused(status: int, message: str) -> Response:
    return JSONResponse({"error": {"message": message, "type": "invalid_request_error", "code": None}}, status)


def _names() -> list[str]:
    return [figure.name for figure in FIGURES]


@cache
def _static(name: str) -> str:
    return files("refimpl.server").joinpath("static", name).read_text(encoding="utf-8")


@cache
def _script() -> str:
    return f'(() => {{\n"use strict";\n{script(_names())}\n{_static("ui_page.js")}\n}})();\n'


def _page(num_engines: int) -> str:
    links = " ".join(f'<a href="?engine={number}">engine {number}</a>' for number in range(num_engines))
    chosen = f"<nav>{links}</nav>" if num_engines > 1 else ""
    hint = escape("API key, to see texts", quote=True)
    return f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>refimpl</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="ui/ui.css">
<header><strong>refimpl</strong>{chosen}<span id="note" role="status">Connecting…</span>
<form id="key"><input name="key" type="password" autocomplete="off" aria-label="{hint}" placeholder="{hint}">
<button>show</button></form></header>
<main id="view"></main>
<noscript>This page draws with JavaScript; nothing of it comes from anywhere but this server.</noscript>
<script src="ui/ui.js"></script>
</html>
"""
