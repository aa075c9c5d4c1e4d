"""ApiError: what goes wrong, as the status and the body that OpenAI's clients parse."""

from __future__ import annotations

from typing import Any

import msgspec

from refimpl.errors import AbortedError, EngineFailedError, PromptError, QueueFullError, RefimplError, RequestError

RETRY_AFTER = {"Retry-After": "1"}
"""Sent where nothing is wrong with the request; the clients of OpenAI wait for so many seconds and come again."""


class ErrorDetail(msgspec.Struct, frozen=True):
    """The object under ``error``."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True):
    """The body of every answer that is an error."""

    error: ErrorDetail


class ApiError(Exception):
    """An answer that is an error. ``param`` names the field that is wrong, ``code`` is for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers or {}

    @property
    def type(self) -> str:
        """OpenAI's word for the kind of error."""
        return TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")

    def body(self) -> bytes:
        """The JSON body."""
        return msgspec.json.encode(ErrorBody(ErrorDetail(printable(self.message), self.type, self.param, self.code)))


TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class ClientGoneError(Exception):
    """The client left: nobody reads an answer."""


def printable(message: str) -> str:
    """A message that can be sent as UTF-8 whatever of the request it repeats, and is not endless."""
    text = message.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= 2000 else f"{text[:2000]}…"


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A request that is wrong in itself."""
    return ApiError(400, message, param=param, code=code)


def aborted() -> ApiError:
    """The answer where somebody at the server ended a request."""
    return ApiError(503, "the request was ended by the server", code="aborted", headers=RETRY_AFTER)


def of_engine(error: RefimplError) -> ApiError:
    """What the engine says about a request, as an answer."""
    if isinstance(error, QueueFullError):
        return ApiError(503, str(error), code="queue_full", headers=RETRY_AFTER)
    if isinstance(error, AbortedError):
        return aborted()
    if isinstance(error, PromptError):
        too_long = "max_model_len" in error.numbers or "needed" in error.numbers
        return bad_request(str(error), "prompt", "context_length_exceeded" if too_long else "invalid_prompt")
    if isinstance(error, RequestError):
        return bad_request(str(error), code="invalid_value")
    if isinstance(error, EngineFailedError):
        return ApiError(500, "the engine failed while this request ran; its log says why", code="engine_failed")
    return ApiError(503, str(error), code="engine_closed")


def of_sample(finish_reason: str, stop_reason: Any) -> ApiError:
    """A sample that did not end by itself; of an error, ``stop_reason`` is the engine's sentence."""
    if finish_reason == "abort":
        return aborted()
    text = str(stop_reason)
    if text.startswith("no token is left"):
        return bad_request(text, code="no_token_left")
    if text.startswith("the step failed"):  # the rest of it is about this machine
        return ApiError(500, "a step of the engine failed while this request ran; its log says why", code="engine_failed")
    return ApiError(500, text, code="generation_failed")
