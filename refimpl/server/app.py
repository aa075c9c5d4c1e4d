"""The app: which path is answered by what. FastAPI routes and describes; bodies are read and written by msgspec."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from refimpl.server.chat import chat
from refimpl.server.completions import completions
from refimpl.server.door import Door, DoorRules
from refimpl.server.errors import ApiError
from refimpl.server.exchange import Answering, Endpoint
from refimpl.server.openapi import body_of, describe
from refimpl.server.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from refimpl.server.service import Service, stuck
from refimpl.server.texts import detokenize, tokenize

LOOK_EVERY = 1.0
"""Seconds between two looks at whether the engine still answers."""
ENDPOINTS: dict[str, tuple[Endpoint, type[msgspec.Struct], str]] = {
    "/v1/completions": (completions, CompletionRequest, "Continue prompts."),
    "/v1/chat/completions": (chat, ChatRequest, "Answer a conversation."),
    "/tokenize": (tokenize, TokenizeRequest, "The token ids of a text or a conversation."),
    "/detokenize": (detokenize, DetokenizeRequest, "The text of token ids."),
}
"""What the engine or its tokenizer answers: endpoint, body, and what it is."""


def make_app(service: Service, rules: DoorRules | None = None) -> FastAPI:
    """The ASGI app over a service."""
    app = FastAPI(
        title="refimpl",
        version=service.version,
        docs_url=None,  # its page would load scripts from elsewhere
        redoc_url=None,
        lifespan=lambda _: _watching(service),
    )
    app.state.service = service
    for path, (endpoint, body, text) in ENDPOINTS.items():
        _add_endpoint(app, service, path, endpoint, body, text)
    _add_models(app, service)
    _add_probes(app, service)
    app.add_exception_handler(HTTPException, _no_such_route)
    app.add_middleware(Door, rules=rules or DoorRules())
    describe(app, [body for _, body, _ in ENDPOINTS.values()])
    return app


def _add_endpoint(
    app: FastAPI, service: Service, path: str, endpoint: Endpoint, body: type[msgspec.Struct], text: str
) -> None:
    async def route(request: Request) -> Response:
        return Answering(service, endpoint)

    app.add_api_route(path, route, methods=["POST"], summary=text, name=path, openapi_extra=body_of(body))


def _add_models(app: FastAPI, service: Service) -> None:
    def card(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": service.started,
            "owned_by": "refimpl",
            "root": service.names[0],
            "parent": None,
            "max_model_len": service.client.max_model_len,
        }

    @app.get("/v1/models", summary="The names that the model answers to.")
    async def models() -> Response:
        return _json({"object": "list", "data": [card(name) for name in service.names]})

    @app.get("/v1/models/{name:path}", summary="One of them.")
    async def model(name: str) -> Response:
        return _json(card(service.model_name(name)))


def _add_probes(app: FastAPI, service: Service) -> None:
    @app.get("/health", summary="200 while the engine can answer, else 503.")
    async def health() -> Response:
        service.check_alive()
        return Response(status_code=200)

    @app.get("/ready", summary="200 while requests are taken, else 503.")
    async def ready() -> Response:
        service.check_alive()
        service.in_flight.check_open()
        return Response(status_code=200)

    @app.get("/version", summary="The version of refimpl.")
    async def version() -> Response:
        return _json({"version": service.version})

    @app.get("/load", summary="Requests under way, and sequences that run and wait.")
    async def load() -> Response:
        found = service.client.load()
        counts = {"num_running": found.num_running, "num_waiting": found.num_waiting}
        return _json({"server_load": len(service.in_flight), **counts})


def _json(content: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")


async def _no_such_route(request: Request, error: Exception) -> Response:
    """Paths and methods that are not there."""
    assert isinstance(error, HTTPException)
    answer = ApiError(error.status_code, f"{request.method} {request.url.path[:200]}: {error.detail}", code="no_such_route")
    return Response(answer.body(), error.status_code, dict(error.headers or {}), "application/json")


@contextlib.asynccontextmanager
async def _watching(service: Service) -> AsyncIterator[None]:
    """While the app runs: when the engine cannot answer any more, those who wait for it are told."""

    async def watch() -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY)
            if (trouble := service.client.trouble()) is not None:
                service.in_flight.end_all(stuck(trouble))

    task = asyncio.create_task(watch())
    try:
        yield
    finally:
        task.cancel()
