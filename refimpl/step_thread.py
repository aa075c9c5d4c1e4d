"""StepThread: the one thread that steps an engine, and the queue of commands that it serves between steps.

::

    any thread or event loop ── post, call ──► commands ──► StepThread: serve, step, serve, step, …
                             ◄── Mailbox: one output a request, later ones merged into it ──┘
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import defaultdict, deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from refimpl.engine import Engine
from refimpl.errors import AbortedError, EngineFailedError, RefimplError
from refimpl.executor.executor import is_lost
from refimpl.intake import PreparedRequest
from refimpl.outputs import RequestOutput
from refimpl.watchdog import PATIENCE, Watchdog

log = logging.getLogger(__name__)

T = TypeVar("T")


class Mailbox:
    """The outputs of one request on their way from the engine's thread to an event loop.

    It holds one output: what comes while nobody takes it is merged into it. So a slow reader costs no memory, and deltas
    put together are still the whole.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.delta = False
        """Whether outputs hold what is new alone."""
        self._lock = threading.Lock()
        self._output: RequestOutput | None = None
        self._error: Exception | None = None
        self._arrived = asyncio.Event()

    def put(self, output: RequestOutput) -> None:
        """In the engine's thread: a further output. The reader's loop must be told (:meth:`ring`)."""
        with self._lock:
            self._output = self._output.joined(output) if self.delta and self._output is not None else output

    def fail(self, error: Exception) -> None:
        """In the engine's thread: nothing more comes but this error."""
        with self._lock:
            self._error = error

    def ring(self) -> None:
        """In the reader's event loop: something arrived."""
        self._arrived.set()

    async def take(self) -> RequestOutput:
        """Wait for the next output.

        Raises:
            RefimplError: the request was refused or aborted, or the engine failed or was closed.

        """
        while True:
            with self._lock:
                self._arrived.clear()
                output, self._output = self._output, None
                if output is None and self._error is not None:
                    raise self._error
            if output is not None:
                return output
            await self._arrived.wait()


class _Closing(BaseException):
    """Leaves a step that the gate holds."""


class StepThread:
    """Owns an engine: nobody else steps it. It sleeps while there is nothing to do."""

    def __init__(self, engine: Engine, patience: float = PATIENCE) -> None:
        self.engine = engine
        self._commands: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._mailboxes: dict[str, Mailbox] = {}
        self._num_aborted = 0
        self._closing = False
        self._ended: Future[None] = Future()
        self._ended.set_running_or_notify_cancel()  # who stops waiting for it does not cancel it
        self._watchdog = Watchdog(patience)
        self._thread = threading.Thread(target=self._run, name="refimpl-engine", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------ from any thread

    def post(self, command: Callable[[], None]) -> None:
        """Have a command run between two steps, or at once while none runs. Nobody waits for it.

        Raises:
            RefimplError: the engine is closed, or this process is a fork of its own.

        """
        self.engine.check_open()
        with self._changed:
            if self._ended.done():
                raise RefimplError("this engine is closed; make a new one")
            self._commands.append(command)
            self._changed.notify()
        self.engine.gate.wake()

    def call(self, function: Callable[[], T]) -> Future[T]:
        """The same, with a future for what it returns or raises.

        Raises:
            RefimplError: too, when a callback of the engine's calls this: who waits for the future would wait for ever.

        """
        self.engine.lock.alone("this")
        future: Future[T] = Future()

        def command() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)

        self.post(command)
        return future

    def add(self, prepared: PreparedRequest, mailbox: Mailbox) -> None:
        """Queue a request. What comes of it, a refusal too, comes into the mailbox.

        Raises:
            RefimplError: the engine is closed, or a callback of its calls this.

        """
        self.engine.lock.alone("generate")
        self.post(lambda: self._add(prepared, mailbox))

    def expect(self, request_id: str, mailbox: Mailbox) -> None:
        """In a command: outputs of this request go there."""
        self._mailboxes[request_id] = mailbox

    def abort(self, request_id: str, mailbox: Mailbox | None = None) -> None:
        """End a request; with a mailbox, only if it is that one's, and not a later one of the same id."""

        def command() -> None:
            if mailbox is None or self._mailboxes.get(request_id) is mailbox:
                if mailbox is not None:
                    del self._mailboxes[request_id]
                self.engine.abort(request_id)

        self.post(command)

    def trouble(self, patience: float) -> str | None:
        """Why nothing comes of requests, in a sentence: it has ended, its other ranks have, or one step has taken longer
        than so many seconds.
        """
        if not self._thread.is_alive():
            return "its thread has ended"
        if is_lost(self.engine.executor):  # why is about this machine: the log has it
            return "another rank of it is lost"
        seconds = self._watchdog.seconds_in_step
        return f"it has been in one step for {seconds:.0f} s" if seconds > patience else None

    def begin_to_close(self) -> Future[None]:
        """Have the thread end after the step at hand and close the engine; the future is done when it has."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self.engine.gate.wake()
        return self._ended

    def close(self) -> None:
        """End the thread and close the engine. May be called twice, and from any thread. Waits for the step at hand, but
        where that waits for the caller.
        """
        if not self.engine.lock.in_its_process:
            return
        self.begin_to_close()
        if threading.current_thread() is not self._thread and not self.engine.lock.in_callback:
            self._thread.join()

    # ------------------------------------------------------------------ in the thread

    def _run(self) -> None:
        try:
            while not self._closing:
                try:
                    self._serve()
                    busy = self.engine.has_unfinished_requests()
                    self._tell_aborted()
                    if not busy:
                        self._sleep()
                    elif (wait := self.engine.due_in()) > 0:
                        self._sleep(wait)
                    else:
                        self._step()
                except Exception as error:
                    self._fail_all(error)
        except _Closing:
            pass
        except BaseException as error:
            log.critical("the thread of the engine ends", exc_info=True)
            self._fail_all(error)
        finally:
            self._end()

    def _step(self) -> None:
        self._watchdog.begin()
        try:
            outputs = self.engine.step(while_held=self._serve_while_held)
        finally:
            self._watchdog.end()
        self._deliver(outputs)

    def _sleep(self, seconds: float | None = None) -> None:
        """Until there is a command, or the seconds are over."""
        with self._changed:
            self._changed.wait_for(lambda: self._commands or self._closing, seconds)

    def _serve(self) -> None:
        """Run the commands that wait now; those that come meanwhile wait for the next turn."""
        for _ in range(len(self._commands)):
            self._commands.popleft()()

    def _serve_while_held(self) -> None:
        self._watchdog.begin()  # it is held, not stuck
        if self._closing:
            raise _Closing
        self._serve()
        self._tell_aborted()
        # A notebook's stop button is noticed when the kernel's event loop wakes up, which no token does now.
        for loop in {mailbox.loop for mailbox in self._mailboxes.values()}:
            _call_soon(loop, lambda: None)

    def _add(self, prepared: PreparedRequest, mailbox: Mailbox) -> None:
        try:
            self.engine.queue(prepared)
        except RefimplError as error:
            self._fail(mailbox, error)
        else:
            self.expect(prepared.request_id, mailbox)

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        """Put outputs into their mailboxes, and tell each event loop once."""
        rung: defaultdict[asyncio.AbstractEventLoop, list[tuple[str, Mailbox]]] = defaultdict(list)
        for output in outputs:
            mailbox = self._mailboxes.get(output.request_id)
            if mailbox is None:
                continue  # a request of somebody else, or one whose reader left during this step
            mailbox.put(output)
            if output.finished:
                del self._mailboxes[output.request_id]
            rung[mailbox.loop].append((output.request_id, mailbox))
        for loop, told in rung.items():
            if not _call_soon(loop, _ring, [mailbox for _, mailbox in told]):  # readers that never said goodbye
                gone = [request_id for request_id, mailbox in told if self._mailboxes.pop(request_id, None) is mailbox]
                self.engine.abort(gone)

    def _tell_aborted(self) -> None:
        """Readers whose requests somebody else aborted must not wait for ever."""
        if self.engine.num_aborted == self._num_aborted:
            return
        self._num_aborted = self.engine.num_aborted
        for request_id in [one for one in self._mailboxes if not self.engine.is_unfinished(one)]:
            error = AbortedError(f"request {request_id!r} was aborted while somebody waited for it", request_id=request_id)
            self._fail(self._mailboxes.pop(request_id), error)

    def _fail_all(self, error: BaseException) -> None:
        """Whatever the engine raised: every request is over, and each reader is told why."""
        mailboxes, self._mailboxes = self._mailboxes, {}
        if mailboxes:
            log.error("the engine failed; %d requests end", len(mailboxes), exc_info=error)
        for request_id, mailbox in mailboxes.items():
            failed = EngineFailedError(f"the engine failed while request {request_id!r} waited: {error!r}")
            failed.__cause__ = error
            self._fail(mailbox, failed)
        self.engine.abort(self.engine.unfinished_request_ids())

    def _fail(self, mailbox: Mailbox, error: Exception) -> None:
        mailbox.fail(error)
        _call_soon(mailbox.loop, mailbox.ring)

    def _end(self) -> None:
        """Close the engine, tell those who wait, and answer the commands that came too late."""
        try:
            self.engine.close()
            closed = RefimplError("this engine was closed while a request waited for it; make a new one")
            for mailbox in self._mailboxes.values():
                self._fail(mailbox, closed)
            self._mailboxes = {}
            self._watchdog.close()
        finally:
            with self._changed:
                self._ended.set_result(None)
                late, self._commands = self._commands, deque()
            for command in late:
                command()  # each learns from the engine that it is closed


def _call_soon(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *arguments: Any) -> bool:
    """Have an event loop call a function; False if it is closed, so that nobody waits there."""
    try:
        loop.call_soon_threadsafe(function, *arguments)
    except RuntimeError:
        return False
    return True


def _ring(mailboxes: list[Mailbox]) -> None:
    for mailbox in mailboxes:
        mailbox.ring()
