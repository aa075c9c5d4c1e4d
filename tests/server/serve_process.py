"""``refimpl serve`` in a process of its own, and the processes that it starts."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

PATIENCE = 240.0
"""Seconds after which a test gives up, on a machine that does much else."""
COMMAND = [sys.executable, "-c", "from refimpl.cli import main; main()", "serve"]


class Served:
    """A server that says it is ready."""

    def __init__(self, process, url, log):
        self.process, self.url, self.log = process, url, log

    @property
    def children(self):
        """Ids of the processes that it started, ranks."""
        return [int(stat.parent.name) for stat in Path("/proc").glob("[0-9]*/stat") if parent_of(stat) == self.process.pid]

    def end(self):
        """By SIGTERM, as a process manager does it."""
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(PATIENCE) == 0


def parent_of(stat):
    try:
        return int(stat.read_text().rpartition(")")[2].split()[1])
    except OSError:  # it has ended meanwhile
        return None


@contextlib.contextmanager
def served(folder, *flags):
    """A server of the tiny model on the CPU, its log in a folder; killed in the end, if it still runs."""
    log = folder / "log"
    with log.open("w") as stderr:
        command = [*COMMAND, "tiny", "--device", "cpu", *map(str, flags)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=os.environ.copy())
    with process:
        try:
            line = process.stdout.readline()
            assert line.startswith("refimpl serves tiny at http"), log.read_text()
            yield Served(process, line.split()[-1].removesuffix("/v1"), log)
        finally:
            process.kill()
