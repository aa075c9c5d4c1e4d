"""The OpenAPI description: FastAPI's, with the bodies that msgspec reads, and the errors that every path may answer with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from fastapi import FastAPI

from refimpl.server.errors import ErrorBody

REF = "#/components/schemas/{name}"
STATUSES = {
    "400": "The request is wrong.",
    "401": "A key is missing or wrong.",
    "403": "Another host or web page.",
    "404": "There is no such model.",
    "408": "The body came too slowly.",
    "413": "The body is too large.",
    "415": "The body is no JSON by its header.",
    "500": "The server failed.",
    "503": "The queue is full, the engine cannot answer, or the server shuts down.",
    "504": "The answer took too long.",
}


def body_of(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """What a route says of its body, beside what FastAPI knows."""
    schema = {"$ref": REF.format(name=kind.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def describe(app: FastAPI, bodies: list[type[msgspec.Struct]]) -> None:
    """Let the app's description hold these bodies."""
    original: Callable[[], dict[str, Any]] = app.openapi
    _, components = msgspec.json.schema_components([*bodies, ErrorBody], ref_template=REF)

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            found = original()
            found.setdefault("components", {}).setdefault("schemas", {}).update(components)
            error = {"application/json": {"schema": {"$ref": REF.format(name="ErrorBody")}}}
            for operation in (one for path in found["paths"].values() for one in path.values()):
                operation["responses"].pop("422", None)
                for status, text in STATUSES.items():
                    operation["responses"][status] = {"description": text, "content": error}
            app.openapi_schema = found
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
