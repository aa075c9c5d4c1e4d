"""Ctrl-C and a notebook's stop button, taken between steps: a step is never torn apart."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from refimpl.outputs import RequestOutput


class GenerationInterrupted(KeyboardInterrupt):
    """Ctrl-C in ``LLM.generate`` or ``chat``. What had finished by then is not lost.

    In a notebook the exception that ended a cell is ``sys.last_value``: ``sys.last_value.outputs`` has the outputs.
    """

    def __init__(self, outputs: list[RequestOutput | None]) -> None:
        finished = sum(output is not None for output in outputs)
        super().__init__(f"{finished} of {len(outputs)} prompts had finished; their outputs are in the exception's .outputs")
        self.outputs = outputs
        """One entry a prompt, in their order; None where a prompt had not finished."""


@contextmanager
def interrupts_between_steps() -> Iterator[Callable[[], None]]:
    """Within the block, a first SIGINT only sets a flag; call what is yielded between steps to raise KeyboardInterrupt then.

    A second one, while the first still waits for a long step, goes through at once. One that nobody took is raised at the
    block's end, whatever else the block raises.

    A block within a block has the same flag. Outside the main thread, and where somebody else handles SIGINT in their own
    way, nothing is changed. The handler of before is back when the block ends.
    """
    interrupted = threading.Event()

    def check() -> None:
        if interrupted.is_set():
            interrupted.clear()
            raise KeyboardInterrupt

    in_main_thread = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGINT)
    if not in_main_thread or handler is not signal.default_int_handler:
        yield getattr(handler, "check", check) if in_main_thread else check
        return

    def on_interrupt(_signal: int, _frame: FrameType | None) -> None:
        if interrupted.is_set():
            interrupted.clear()
            raise KeyboardInterrupt
        interrupted.set()

    on_interrupt.check = check  # type: ignore[attr-defined]
    previous = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield check
    except BaseException as error:
        signal.signal(signal.SIGINT, previous)
        if interrupted.is_set():
            raise KeyboardInterrupt from error
        raise
    signal.signal(signal.SIGINT, previous)
    check()  # after the handler is back: none slips in between
