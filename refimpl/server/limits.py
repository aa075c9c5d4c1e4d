"""Limits: how much a client may ask for. Each refusal names the limit."""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import dataclass, field, fields
from typing import Any

import msgspec

from refimpl.errors import ConfigError
from refimpl.server.errors import ApiError, bad_request


def _limit(default: float, text: str) -> Any:
    """A field of Limits with the sentence that ``refimpl serve --help`` shows for it."""
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class Limits:
    """What one request may hold. Of tokens, ``max_model_len`` is the limit; of log-probabilities, ``max_logprobs``.

    Raises:
        ConfigError: a limit is no number above 0.

    """

    max_body_bytes: int = _limit(16 * 1024**2, "Most bytes of a request's body (413).")
    max_prompts: int = _limit(1024, "Most prompts in one request.")
    max_n: int = _limit(128, "Most samples of one prompt.")
    max_choices: int = _limit(1024, "Most samples of all prompts of a request.")
    max_messages: int = _limit(4096, "Most messages of a conversation.")
    max_stop: int = _limit(32, "Most stop strings.")
    max_stop_chars: int = _limit(1024, "Most characters of a stop string or bad word.")
    max_bias: int = _limit(1024, "Most entries of logit_bias.")
    max_ids: int = _limit(65_536, "Most ids in stop_token_ids or allowed_token_ids.")
    max_bad_words: int = _limit(256, "Most bad words.")
    max_schema_bytes: int = _limit(64 * 1024, "Most bytes of a JSON schema or another grammar.")
    max_schema_depth: int = _limit(32, "How deep a JSON schema may be nested.")
    max_salt_chars: int = _limit(256, "Most characters of cache_salt and user.")
    body_timeout: float = _limit(30.0, "Seconds in which headers, and then a body, must arrive (408).")
    request_timeout: float = _limit(3600.0, "Seconds that one answer may take (504); 0: any time.")

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if not value > 0 and not (one.name == "request_timeout" and value == 0):
                raise ConfigError(f"{one.name} is {value!r}; it must be above 0")

    def check_count(self, name: str, given: Sized | None, most: int, what: str = "entries") -> None:
        """See that a list or dict is not too long.

        Raises:
            ApiError: it is.

        """
        if given is not None and len(given) > most:
            raise bad_request(f"{name} has {len(given)} {what}; this server takes at most {most}", name, "limit_exceeded")

    def check_number(self, name: str, given: int, most: int) -> None:
        """See that a number is not too large.

        Raises:
            ApiError: it is.

        """
        if given > most:
            raise bad_request(f"{name} is {given}; this server takes at most {most}", name, "limit_exceeded")

    def check_schema(self, name: str, schema: Any) -> str:
        """A JSON schema, or another grammar, as text.

        Raises:
            ApiError: it is too long, or nested too deep.

        """
        text = schema if isinstance(schema, str) else msgspec.json.encode(schema).decode()
        size = len(text.encode("utf-8", "replace"))
        if size > self.max_schema_bytes:
            raise bad_request(
                f"{name} has {size:,} bytes; this server takes at most {self.max_schema_bytes:,}", name, "limit_exceeded"
            )
        if _deeper(schema, self.max_schema_depth):
            raise bad_request(
                f"{name} is nested deeper than {self.max_schema_depth} levels, this server's limit", name, "limit_exceeded"
            )
        return text

    def too_large(self) -> ApiError:
        """The answer to a body over the limit."""
        return ApiError(413, f"the body is larger than {self.max_body_bytes:,} bytes, this server's limit", code="too_large")


def _deeper(value: Any, most: int) -> bool:
    """Whether lists and dicts are nested deeper than that."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return inner is not None and (most == 0 or any(_deeper(one, most - 1) for one in inner))
