"""ServeOptions: what ``refimpl serve`` is told beside its engine and its limits. Checked when made; needs no extra."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from refimpl.errors import ConfigError

KEYS_VARIABLE = "REFIMPL_API_KEY"
"""Keys, separated by spaces, for those who do not want them in a list of processes."""
LOG_LEVELS = ("debug", "info", "warning", "error")


def _option(default: Any, text: str) -> Any:
    """A field of ServeOptions with the sentence that ``refimpl serve --help`` shows for it."""
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Where a server listens, who may ask it, and what else it shows.

    Raises:
        ConfigError: an option is out of its range, or one is missing beside another.

    """

    host: str = _option("127.0.0.1", "The address to listen on; 0.0.0.0 for all of this machine's.")
    port: int = _option(8000, "The port; 0 for any that is free.")
    served_model_name: list[str] | None = _option(
        None, "A name that the model answers to, by default MODEL; may be given several times."
    )
    api_key: list[str] | None = _option(
        None,
        f"A key that clients must send (or {KEYS_VARIABLE} in the environment); several times: clients of different keys "
        "share no cached prefix.",
    )
    allowed_hosts: list[str] | None = _option(
        None, "A name that a Host header may have; by default any, or this machine's own on a loopback --host."
    )
    allowed_origins: list[str] | None = _option(
        None, "An origin of web pages that may ask, or '*'; by default the server's own alone."
    )
    ssl_certfile: str | None = _option(None, "A certificate (PEM): serve https.")
    ssl_keyfile: str | None = _option(None, "Its key (PEM).")
    shutdown_timeout: float = _option(30.0, "Seconds in which answers may finish after SIGTERM or Ctrl-C.")
    stuck_after: float = _option(60.0, "Seconds in one step after which /health says 503.")
    data_parallel_size: int = _option(1, "Engines of this model on this machine, each with a cache of its own; a GPU each.")
    ui: bool = _option(True, "Serve the page /ui.")
    vllm_metrics: bool = _option(True, "Show figures at /metrics under vLLM's names too.")
    log_level: str = _option("info", f"{', '.join(LOG_LEVELS)}. info has a line a request.")
    use_v2_block_manager: bool = _option(False, "Of older vLLM; changes nothing.")

    def __post_init__(self) -> None:
        if self.api_key is None:
            object.__setattr__(self, "api_key", os.environ.get(KEYS_VARIABLE, "").split() or None)
        if not all(self.api_key or ()):
            raise ConfigError("--api-key is empty; give a key, or leave it out")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port is {self.port}; it must be a number from 0 (any that is free) to 65535")
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise ConfigError("--ssl-certfile and --ssl-keyfile go together; give both, or neither")
        if self.log_level not in LOG_LEVELS:
            raise ConfigError(f"--log-level is {self.log_level!r}; it must be one of {', '.join(LOG_LEVELS)}")
        for name, least in (("shutdown_timeout", 0), ("stuck_after", 1), ("data_parallel_size", 1)):
            if not getattr(self, name) >= least:
                flag = f"--{name.replace('_', '-')}"
                raise ConfigError(f"{flag} is {getattr(self, name)!r}; it must be {least} or more")
