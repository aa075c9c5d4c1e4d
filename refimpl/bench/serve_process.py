"""``refimpl serve`` as a process of its own, for as long as it is measured."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from refimpl.config import EngineArgs
from refimpl.errors import RefimplError

SERVE = (sys.executable, "-c", "from refimpl.cli import main; main()", "serve")
TO_START, TO_END = 900.0, 30.0
"""Seconds that a server may take to start (it loads weights and compiles), and to end before it is killed."""
TAIL = 2_000
"""Characters of what it said that are told if it does not start."""


def flags_of(engine_options: dict[str, Any]) -> list[str]:
    """Engine options as flags of the command line; those that are the defaults are left out."""
    defaults = {field.name: field.default for field in dataclasses.fields(EngineArgs)}
    flags: list[str] = []
    for name, value in engine_options.items():
        flag = name.replace("_", "-")
        if value is None or value == defaults.get(name):
            continue
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, msgspec.Struct | dict) or dataclasses.is_dataclass(value):
            flags += [f"--{flag}", json.dumps(msgspec.to_builtins(value))]
        else:
            flags += [f"--{flag}", str(value)]
    return flags


@contextlib.contextmanager
def served(flags: Sequence[str], command: Sequence[str] = SERVE, to_start: float = TO_START) -> Iterator[str]:
    """Start a server on a free port of this machine, wait until it is healthy, and end it after the block. Yields its URL.

    Raises:
        RefimplError: it ends, or does not answer in time; the message has the end of what it said.

    """
    port = _free_port()
    with tempfile.TemporaryDirectory() as folder:
        said = Path(folder) / "server.log"
        with said.open("wb") as log:
            process = subprocess.Popen(
                [*command, *flags, "--host", "127.0.0.1", "--port", str(port)],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
            )
        try:
            _wait_until_healthy(port, process, said, time.monotonic() + to_start)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            try:
                process.wait(TO_END)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _healthy(port: int) -> bool:
    asked = http.client.HTTPConnection("127.0.0.1", port, timeout=5.0)
    with contextlib.closing(asked), contextlib.suppress(OSError, http.client.HTTPException):
        asked.request("GET", "/health")
        return asked.getresponse().status == 200
    return False


def _wait_until_healthy(port: int, process: subprocess.Popen[bytes], said: Path, until: float) -> None:
    while time.monotonic() < until:
        if (code := process.poll()) is not None:
            raise RefimplError(f"refimpl serve ended with code {code} before it answered; it said: {_tail(said)}")
        if _healthy(port):
            return
        time.sleep(0.1)
    url = f"http://127.0.0.1:{port}"
    raise RefimplError(f"refimpl serve did not answer at {url}/health in time; it said: {_tail(said)}")


def _tail(said: Path) -> str:
    return said.read_text(encoding="utf-8", errors="replace")[-TAIL:].strip() or "nothing"
