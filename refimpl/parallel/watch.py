"""Watch: one thread of the engine's process that starts the other ranks, hears from them, and ends all when one fails.

A rank is given up when its process has ended, when its socket is closed, when it says that it failed, when it is silent
(every rank says that it lives twice a second, whatever it computes), or when the others have waited for it too long
(:mod:`refimpl.parallel.progress`). All others are killed then, so that whoever waits for them in a collective is told.
Nothing is tried again: the engine's requests end with an error.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable

from refimpl.errors import RankFailedError
from refimpl.parallel import wire
from refimpl.parallel.processes import Processes
from refimpl.parallel.progress import Progress

log = logging.getLogger(__name__)

POLL_SECONDS = 0.2
BEAT_SECONDS = 0.5
"""How often a rank says that it lives."""
SILENT_SECONDS = 4.0
"""How long a rank that serves may be silent."""
SILENT_WHILE_LOADING_SECONDS = 120.0
"""The same while it imports, reads and compiles, some of which lets no other thread run."""
CONNECT_SECONDS = 300.0
"""In which every rank has connected."""
CLOSE_SECONDS = 3.0
"""In which a rank that was told to end has ended."""


class Watch:
    """The other ranks of an engine, from their start to their end.

    Args:
        size: ranks, this process among them.
        setups: what to tell each of the others, by rank.
        processes: those of this machine; None where somebody else starts them.
        listener: where they connect.
        token: what they must know.
        patience: seconds for which the others may wait for one of them.

    """

    def __init__(
        self,
        size: int,
        setups: dict[int, bytes],
        processes: Processes | None,
        listener: socket.socket,
        token: bytes,
        patience: float,
    ) -> None:
        self._size, self._setups, self._processes = size, setups, processes
        self._listener, self._token = listener, token
        self._process = os.getpid()
        self._connections: dict[int, socket.socket] = {}
        self._frames: dict[int, wire.Frames] = {}
        self._heard: dict[int, float] = {}
        self._ready: set[int] = set()
        self._progress = Progress(size, patience)
        self.entered_here: Callable[[], int] = lambda: 0
        """Collectives that rank 0 has entered."""
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._changed = threading.Condition()
        self._closing = False
        self.failure: str | None = None
        """Why the ranks are given up."""
        self.on_failure: Callable[[], object] = lambda: None
        """Called by the watching thread, to end what this process waits for."""
        self.process_ids: list[int] = []
        """Of the other ranks on this machine."""
        self._began = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="refimpl-ranks", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------ for the engine's threads

    def wait_connected(self) -> None:
        """Wait until every rank has connected and was told what to load.

        Raises:
            RankFailedError: one ended or failed.

        """
        self.wait_until(lambda: len(self._connections) == self._size - 1)

    def wait_ready(self) -> None:
        """Wait until every rank has loaded everything.

        Raises:
            RankFailedError: one ended or failed.

        """
        self.wait_until(lambda: len(self._ready) == self._size - 1)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait for something that comes with the ranks, or beside them.

        Raises:
            RankFailedError: one ended or failed.

        """
        with self._changed:
            while not condition():
                self.check()
                self._changed.wait(POLL_SECONDS)
        self.check()

    def check(self) -> None:
        """See that no rank has failed.

        Raises:
            RankFailedError: one has.

        """
        if self.failure is not None:
            raise RankFailedError(self.failure)

    def why(self, otherwise: str) -> str:
        """What failed. A collective may have failed before its cause is known here: that is waited for, else given up."""
        with self._changed:
            self._changed.wait_for(lambda: self.failure is not None, SILENT_SECONDS + 1)
            if self.failure is None:
                self.failure = otherwise
            return self.failure

    def give_up(self, why: str) -> None:
        """End the ranks, for a reason that is this process's."""
        self._fail(why)

    def send(self, payload: bytes) -> None:
        """Send a step to every rank.

        Raises:
            RankFailedError: one has failed.

        """
        self.check()
        for rank, connection in self._connections.items():
            try:
                wire.send(connection, wire.STEP, payload)
            except OSError as error:
                raise RankFailedError(self.why(f"rank {rank} cannot be reached ({error})")) from error

    def close(self) -> None:
        """Tell the ranks to end, and see that they have. May be called twice; in a forked child nothing is done."""
        if os.getpid() != self._process or self._closing:
            return
        self._closing = True
        for connection in list(self._connections.values()):
            with contextlib.suppress(OSError):
                wire.send(connection, wire.CLOSE)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # ------------------------------------------------------------------ the watching thread

    def _run(self) -> None:
        try:
            if self._processes is not None:
                self._processes.start(self._listener.getsockname()[1], self._token)
                self.process_ids = self._processes.ids
            while self.failure is None and not self._closing:
                self._look()
        except Exception as error:
            self._fail(f"the other ranks cannot be watched: {error!r}")
        if self._closing and self._processes is not None:
            self._processes.wait(CLOSE_SECONDS)
        self._end()

    def _look(self) -> None:
        """Hear what has come, then see who has ended or is silent."""
        began = time.monotonic()
        for key, _ in self._selector.select(POLL_SECONDS):
            if key.fileobj is self._listener:
                self._admit()
            else:
                self._hear(key.data)
        now = time.monotonic()
        if now - began > SILENT_SECONDS / 2:  # this process was stopped or starved: that others are silent means nothing
            self._heard = dict.fromkeys(self._heard, now)
            self._progress.forget()
        if self._processes is not None and not self._closing and (dead := self._processes.dead()) is not None:
            self._fail(dead)
        for rank, heard in self._heard.items():
            allowed = SILENT_SECONDS if rank in self._ready else SILENT_WHILE_LOADING_SECONDS
            if now - heard > allowed:
                self._fail(f"rank {rank} has said nothing for {now - heard:.1f} seconds: it is stopped or stuck")
        self._progress.tell(0, self.entered_here())
        if (stuck := self._progress.stuck(now, self._ready)) is not None:
            self._fail(stuck)
        if len(self._connections) < self._size - 1 and now - self._began > CONNECT_SECONDS:
            missing = sorted(set(range(1, self._size)) - set(self._connections))
            self._fail(f"ranks {', '.join(map(str, missing))} have not connected within {CONNECT_SECONDS:g} seconds")

    def _admit(self) -> None:
        """Let a rank in that knows the token, and tell it what to load."""
        connection, _ = self._listener.accept()
        try:
            rank = wire.admit(connection, self._token)
            if rank not in self._setups or rank in self._connections:
                raise wire.WireError(f"rank {rank} is none of this engine, or is here already")
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            wire.send(connection, wire.SETUP, self._setups[rank])
        except (wire.WireError, OSError):
            connection.close()  # a stranger; a rank that cannot be let in ends, which is seen
            return
        self._selector.register(connection, selectors.EVENT_READ, rank)
        self._frames[rank], self._heard[rank] = wire.Frames(), time.monotonic()
        with self._changed:
            self._connections[rank] = connection
            self._changed.notify_all()
        if len(self._connections) == self._size - 1:  # nobody else is expected, and nobody can keep this thread busy
            self._selector.unregister(self._listener)
            self._listener.close()

    def _hear(self, rank: int) -> None:
        try:
            data = self._connections[rank].recv(2**16)
            frames = list(self._frames[rank].feed(data))
        except wire.WireError as error:
            self._selector.unregister(self._connections[rank])
            self._fail(f"rank {rank} cannot be heard ({error})")
            return
        except OSError as error:  # what was sent to a process that ended unread comes back as a reset
            self._hung_up(rank, f"rank {rank} cannot be heard ({error})")
            return
        if not data:
            self._hung_up(rank, f"rank {rank} closed its connection")
        self._heard[rank] = time.monotonic()
        for kind, payload in frames:
            if kind == wire.BEAT:
                self._progress.tell(rank, wire.COUNT.unpack(payload)[0])
            elif kind == wire.READY:
                with self._changed:
                    self._ready.add(rank)
                    self._changed.notify_all()
            elif kind == wire.FAILED:
                self._fail(f"rank {rank} failed: {payload.decode(errors='replace')}")

    def _hung_up(self, rank: int, why: str) -> None:
        """A connection is gone: most often the process has ended, and its end says more than ``why``."""
        self._selector.unregister(self._connections[rank])
        if self._closing:
            return
        if self._processes is not None:
            self._processes.wait(POLL_SECONDS)
            if (dead := self._processes.dead()) is not None:
                self._fail(dead)
        self._fail(why)

    def _fail(self, why: str) -> None:
        """Give up: the first reason stays."""
        if self._closing:
            return
        with self._changed:
            self.failure = self.failure or why
            self._changed.notify_all()

    def _end(self) -> None:
        """Nothing of the ranks stays: processes, sockets, files."""
        for connection in (*self._connections.values(), self._listener):
            connection.close()
        self._selector.close()
        if self._processes is not None:
            self._processes.end()
        if self.failure is not None:
            if len(self._ready) == self._size - 1:  # before, whoever starts the engine is told
                log.error("the other ranks are given up: %s", self.failure)
            self.on_failure()
        with self._changed:
            self._changed.notify_all()
