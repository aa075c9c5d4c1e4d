"""Service: what all requests share: the engine's client, the names that the model answers to, limits, what is under way."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version

from refimpl.server.client import EngineClient
from refimpl.server.errors import RETRY_AFTER, ApiError
from refimpl.server.grammars import Grammars
from refimpl.server.in_flight import InFlight
from refimpl.server.limits import Limits


@dataclass
class Service:
    """The state behind the routes."""

    client: EngineClient
    names: tuple[str, ...]
    """Names that the model answers to; the first stands in replies."""
    limits: Limits = field(default_factory=Limits)
    in_flight: InFlight = field(default_factory=InFlight)
    version: str = field(default_factory=lambda: installed_version())
    """Of refimpl."""
    started: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        client = self.client
        self.grammars = Grammars(client.tokenizer, client.vocab_size, client.eos_token_ids)

    def model_name(self, asked: str | None) -> str:
        """The name under which to answer.

        Raises:
            ApiError: no model is served under that name.

        """
        if asked is None:
            return self.names[0]
        if asked not in self.names:
            raise ApiError(
                404,
                f"the model {asked[:200]!r} is not served here; there is {', '.join(self.names)}",
                param="model",
                code="model_not_found",
            )
        return asked

    def check_alive(self) -> None:
        """See that the engine can answer.

        Raises:
            ApiError: it cannot.

        """
        if (trouble := self.client.trouble()) is not None:
            raise stuck(trouble)

    def drain(self) -> None:
        """Take no further requests; those under way go on."""
        self.in_flight.close(ApiError(503, "this server is shutting down", code="shutting_down", headers=RETRY_AFTER))

    def end_all(self) -> None:
        """End what is under way: the time to shut down is over."""
        self.in_flight.end_all(ApiError(503, "this server shut down before the answer was whole", code="shutting_down"))


def installed_version() -> str:
    """The version of refimpl that is installed."""
    try:
        return version("refimpl")
    except PackageNotFoundError:  # a checkout that was not installed
        return "unknown"


def stuck(trouble: str) -> ApiError:
    """The answer of a server whose engine cannot."""
    return ApiError(503, f"the engine cannot answer: {trouble}", code="engine_unavailable", headers=RETRY_AFTER)
