"""The processes of the other ranks, as the engine starts them: a fresh Python each, nothing of this process but options."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import refimpl
from refimpl.errors import RankFailedError

ENGINE = "REFIMPL_ENGINE"
"""The environment variable that tells a rank where its engine listens, and the token: ``RANK PORT TOKEN PARENT FOLDER``."""
LAST_LINES = 15
"""Of what a rank wrote before it died, for the error message."""
ONE_AT_A_TIME = 5.0
"""Seconds in which a killed process is gone."""


class Processes:
    """Ranks 1 to ``size`` - 1 on this machine. What they write goes into files of a private folder.

    To be started and ended by one thread that lives as long as they do: the system kills them when it is gone.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.folder = Path(tempfile.mkdtemp(prefix="refimpl-"))
        """Readable by this user alone; the store by which ranks find each other is here too."""
        self._running: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, port: int, token: bytes) -> None:
        """Start all of them, which connect to the port.

        Raises:
            RankFailedError: this Python cannot say how to start another one.

        """
        if not sys.executable:
            raise RankFailedError(
                "tensor_parallel_size > 1 starts Python processes, and sys.executable does not name Python"
            )
        environment = dict(os.environ)
        package = Path(refimpl.__file__).parent.parent
        if package.name != "site-packages":  # a checkout, which a notebook may have put on its path by hand
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(package), os.environ.get("PYTHONPATH", ""))))
        environment.setdefault("OMP_NUM_THREADS", str(max(1, _cores() // self.size)))
        for rank in range(1, self.size):
            environment[ENGINE] = f"{rank} {port} {token.hex()} {os.getpid()} {self.folder}"
            with self._log(rank).open("wb") as log:
                self._running[rank] = subprocess.Popen(
                    [sys.executable, "-P", "-m", "refimpl.parallel.worker"],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    start_new_session=True,  # Ctrl-C at the terminal is for the engine alone
                )

    def dead(self) -> str | None:
        """Which rank has ended, and how; None while all live."""
        for rank, process in self._running.items():
            if (code := process.poll()) is not None:
                return f"rank {rank} {_how(code)}{self.last_lines(rank)}"
        return None

    def last_lines(self, rank: int) -> str:
        """What a rank wrote last, after a colon; empty if it wrote nothing."""
        try:
            lines = self._log(rank).read_text(encoding="utf-8", errors="replace").strip().splitlines()
        except OSError:
            lines = []
        return ":\n" + "\n".join(f"    {line}" for line in lines[-LAST_LINES:]) if lines else ""

    def wait(self, seconds: float) -> None:
        """Wait until all have ended, so long at most."""
        until = time.monotonic() + seconds
        for process in self._running.values():
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                return

    def end(self) -> None:
        """Kill those that still run, stopped ones too, and remove the folder."""
        for process in self._running.values():
            if process.poll() is None:
                process.kill()
        for process in self._running.values():
            process.wait(ONE_AT_A_TIME)
        self._running = {}
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def ids(self) -> list[int]:
        """Of the processes."""
        return [process.pid for process in self._running.values()]

    def _log(self, rank: int) -> Path:
        return self.folder / f"rank-{rank}.log"


def _how(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
