r"""A rank other than 0: ``python -m refimpl.parallel.worker``, started by the engine's process.

It connects to the engine, loads its share, and computes every step that it is told of, until it is told to end. It ends by
itself, at once, when the engine's process does: the system says so, and the socket is closed.

For ranks on several machines, torchrun starts all of them, rank 0 included, which then runs the command that follows::

    export REFIMPL_TOKEN=…            # the same 32 random hexadecimal digits or more on every machine
    torchrun --nnodes 2 --node-rank R --nproc-per-node 8 --master-addr HOST --master-port 29500 \
        -m refimpl.parallel.worker generate "Hello" --model FOLDER --tensor-parallel-size 16
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import runpy
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from refimpl.errors import RefimplError
from refimpl.parallel import torchrun, wire
from refimpl.parallel.processes import ENGINE
from refimpl.parallel.watch import BEAT_SECONDS

if TYPE_CHECKING:
    from refimpl.parallel.setup import Setup

PR_SET_PDEATHSIG = 1
"""prctl(2): the signal that this process gets when the thread that started it is gone."""


class Line:
    """The socket to the engine, with threads that listen to it and say that this process lives, and how far it is.

    Args:
        connection: after the handshake.
        folder: to be removed if the engine's process has died; None if it is not ours.

    """

    def __init__(self, connection: socket.socket, folder: Path | None) -> None:
        self._connection, self._folder = connection, folder
        self._sending = threading.Lock()
        self.entered: Callable[[], int] = lambda: 0
        """Collectives that this rank has entered."""
        self.arrived: queue.SimpleQueue[tuple[bytes, bytes]] = queue.SimpleQueue()
        threading.Thread(target=self._listen, name="refimpl-line", daemon=True).start()
        threading.Thread(target=self._beat, name="refimpl-beat", daemon=True).start()

    def say(self, kind: bytes, payload: bytes = b"") -> None:
        """Tell the engine something; if nobody hears it, this process is about to end."""
        with self._sending, contextlib.suppress(OSError):
            wire.send(self._connection, kind, payload)

    def _beat(self) -> None:
        while True:
            self.say(wire.BEAT, wire.COUNT.pack(self.entered()))
            time.sleep(BEAT_SECONDS)

    def _listen(self) -> None:
        frames = wire.Frames()
        with contextlib.suppress(OSError, wire.WireError):
            while data := self._connection.recv(2**16):
                for frame in frames.feed(data):
                    self.arrived.put(frame)
        # The engine's process is no more, or has given up: end, whatever the other thread computes.
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        os._exit(1)


def serve(line: Line, setup: Setup, store: Any, loopback: bool) -> None:
    """Load this rank's share, then compute steps until the end. The engine is told of a failure."""
    import torch

    from refimpl.executor.device import resolve_dtype
    from refimpl.executor.local import LocalExecutor
    from refimpl.loading.checkpoint import open_checkpoint
    from refimpl.outputs import Batch, SchedulerOutput
    from refimpl.parallel.collectives import join
    from refimpl.parallel.symmetric import shorten

    args = setup.args()
    device = torch.device(setup.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    ranks = join(store, setup.rank, setup.size, device, loopback)
    line.entered = lambda: ranks.entered
    checkpoint = open_checkpoint(args.model)
    shorten(ranks, args, checkpoint.config, resolve_dtype(args.dtype, device), store)
    executor = LocalExecutor(args, checkpoint, setup.max_model_len, False, ranks)
    line.say(wire.READY)
    known = Batch(-1, (), (), ())
    while True:
        kind, payload = line.arrived.get()
        if kind == wire.CLOSE:
            return
        scheduler_output = SchedulerOutput.from_wire(payload, known)
        known = scheduler_output.batch
        executor.runner.launch(scheduler_output)  # nobody waits for what it brings: rank 0 has the same


def die_with(parent: int) -> None:
    """Have the system kill this process when the thread that started it is gone (Linux; elsewhere the socket says it)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before
        os._exit(1)


def run_by_engine() -> None:
    """A rank on the engine's own machine, which the engine has started."""
    rank, port, token, parent, folder = os.environ.pop(ENGINE).split(" ", 4)
    die_with(int(parent))
    line, setup = connect((wire.LOOPBACK, int(port)), bytes.fromhex(token), int(rank), Path(folder))

    def store() -> Any:
        from refimpl.parallel.collectives import file_store

        return file_store(Path(folder), setup.size)

    run(line, setup, store, loopback=True)


def run_by_torchrun() -> None:
    """A rank that torchrun has started. Number 0 runs the command that was given, others wait for its engine."""
    if os.environ["RANK"] == "0":
        runpy.run_module("refimpl", run_name="__main__")
        return
    rank, address, token, store = torchrun.other_rank()
    line, setup = connect(address, token, rank, None)
    device = f"cuda:{os.environ['LOCAL_RANK']}" if setup.device.startswith("cuda") else setup.device
    run(line, msgspec.structs.replace(setup, device=device), lambda: store, loopback=False)


def connect(address: tuple[str, int], token: bytes, rank: int, folder: Path | None) -> tuple[Line, Setup]:
    """Find the engine, and hear what is to be loaded."""
    connection = socket.create_connection(address)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    wire.greet(connection, token, rank)
    line = Line(connection, folder)
    from refimpl.parallel.setup import Setup  # imports torch, which takes seconds: the engine knows already that we live

    kind, payload = line.arrived.get()
    if kind != wire.SETUP:
        sys.exit(f"the engine began with a frame {kind!r}")
    return line, Setup.from_wire(payload)


def run(line: Line, setup: Setup, store: Callable[[], Any], loopback: bool) -> None:
    """Serve, and end this process: nothing that it holds is worth an orderly end."""
    try:
        serve(line, setup, store(), loopback)
    except BaseException as error:
        traceback.print_exc()
        line.say(wire.FAILED, (str(error) if isinstance(error, RefimplError) else repr(error)).encode())
        os._exit(1)
    os._exit(0)


def main() -> None:
    """By whom this process was started is in its environment."""
    signal.signal(signal.SIGINT, signal.SIG_IGN if os.environ.get("RANK") != "0" else signal.default_int_handler)
    if ENGINE in os.environ:
        run_by_engine()
    elif torchrun.started_here():
        run_by_torchrun()
    else:
        sys.exit(
            f"an engine with tensor_parallel_size > 1 starts this module, or torchrun with {torchrun.TOKEN}: see its head"
        )


if __name__ == "__main__":
    main()
