"""EngineLock: one caller at a time and no callback of its, in the order of asking, in the process that made it alone."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Collection
from types import TracebackType
from typing import Self

from refimpl.errors import RefimplError


class EngineLock:
    """A reentrant lock that is handed on to whoever has waited longest.

    Python's own locks go to whoever is quickest: a loop that steps would take its lock again before a thread that sleeps on
    it wakes up, and a button, or a request that is to be added, would wait for seconds. Here it waits for one step.

    After ``fork()`` the child has neither the threads nor the device of its parent, and perhaps a lock that nobody will give
    back. So it is refused there, before anything is waited for.

    Who has the lock runs callbacks: logits hooks, policies, event subscribers. They must not order what it is in the midst
    of (:meth:`alone`); and where ``step_threads`` run them, for which it waits, they could not even wait for the lock.
    """

    def __init__(self, step_threads: Collection[int] = ()) -> None:
        self._step_threads = step_threads
        self._process = os.getpid()
        self._mutex = threading.Lock()
        self._owner: int | None = None
        self._depth = 0
        self._turns: deque[tuple[int, threading.Lock]] = deque()

    @property
    def in_its_process(self) -> bool:
        """False in a child that was forked off."""
        return os.getpid() == self._process

    @property
    def in_callback(self) -> bool:
        """Whether the caller is called by who has the lock, or by one of the threads that compute steps."""
        me = threading.get_ident()
        return self._owner == me or me in self._step_threads

    def alone(self, call: str) -> Self:
        """The lock, for a call that no callback may make.

        Raises:
            RefimplError: it is made by one.

        """
        if self.in_callback:
            raise RefimplError(
                f"{call} was called within another call of the same engine: by a logits hook, a policy, an event subscriber "
                "or another callback of its. The engine waits for the callback, which would wait for the engine. Note there "
                "what is to be done, and do it when the step is over; abort may be called, and is done then"
            )
        return self

    def check_process(self) -> None:
        """See that this is the process that made the engine.

        Raises:
            RefimplError: it is a fork of it.

        """
        if not self.in_its_process:
            raise RefimplError(
                f"this engine was made in process {self._process}, and process {os.getpid()} was forked off it: its threads "
                "and its device are not here. Make an engine in the process that uses it (multiprocessing: the start method "
                "'spawn')"
            )

    def __enter__(self) -> None:
        self.check_process()
        me = threading.get_ident()
        if self._owner == me:  # nobody but this thread writes that
            self._depth += 1
            return
        if me in self._step_threads:
            self.alone("this")
        turn = threading.Lock()
        try:
            with self._mutex:
                taken = self._owner is not None
                if taken:
                    turn.acquire()
                    self._turns.append((me, turn))
                else:
                    self._owner = me
            if taken:
                turn.acquire()  # until it is handed over
        except BaseException:  # Ctrl-C while it waits
            self._withdraw(me)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._depth:
            self._depth -= 1
            return
        with self._mutex:
            self._hand_on()

    def _hand_on(self) -> None:
        self._owner = None
        if self._turns:
            self._owner, turn = self._turns.popleft()
            turn.release()

    def _withdraw(self, me: int) -> None:
        with self._mutex:
            if self._owner == me:
                self._hand_on()
            self._turns = deque(waiting for waiting in self._turns if waiting[0] != me)
