"""One replica of several, and a request that runs on one of them."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from refimpl.async_llm import AsyncLLM, RequestStream
from refimpl.config import EngineArgs
from refimpl.errors import ConfigError, RefimplError, RequestError
from refimpl.executor.device import resolve_device
from refimpl.kernels.philox import mix_seed
from refimpl.outputs import CompletionOutput, RequestOutput
from refimpl.step_loop import STEP_FAILED
from refimpl.step_thread import Mailbox
from refimpl.watchdog import PATIENCE

if TYPE_CHECKING:
    from refimpl.server.router import Replicas

FAILURES = 3
"""Requests that a replica fails one after the other, none served between them, until it counts as lost."""


@dataclass(eq=False)
class Replica:
    """One engine, and what is known of its health."""

    name: str
    llm: AsyncLLM
    load: int = 0
    """Requests that it was given and that are not over."""
    failures: int = 0
    """In a row."""
    lost: str | None = None
    """Why it gets no more requests, in a sentence."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def trouble(self, patience: float = PATIENCE) -> str | None:
        """Why it gets no more requests; None while it does. One that is stuck in a step gets more when that is over."""
        if self.lost is None and not self.llm.engine.is_open:
            self.lost = f"replica {self.name} is closed"
        if self.lost is not None:
            return self.lost
        found = self.llm.trouble(patience)
        return None if found is None else f"replica {self.name}: {found}"

    def took(self) -> None:
        """It was given a request."""
        with self.lock:
            self.load += 1

    def gave(self, failed: bool | None) -> None:
        """A request of it is over; ``failed`` is None where that says nothing of its health."""
        with self.lock:
            self.load -= 1
            if failed is not None:
                self.failures = self.failures + 1 if failed else 0
            if self.failures >= FAILURES:
                self.lost = self.lost or f"replica {self.name} failed {FAILURES} requests one after the other"


class RoutedStream(RequestStream):
    """A request of one replica, which is chosen when it begins."""

    def __init__(self, replicas: Replicas, request_id: str) -> None:
        first = replicas.members[0].llm
        super().__init__(first, first.step_thread, request_id)
        self._replicas = replicas
        self._replica: Replica | None = None
        self._reading = False

    async def _begin(self, output_kind: str | None = None) -> Mailbox:
        if self._prepared is None:
            self._prepared = await asyncio.to_thread(self._prepare)
        prepared = self._prepared
        self.join(self._replicas.route(prepared))
        return await super()._begin(output_kind)

    def join(self, replica: Replica) -> None:
        """Be a request of this replica."""
        self._replicas.claim(self.request_id, replica)
        self._replica, self._llm, self._thread = replica, replica.llm, replica.llm.step_thread

    def adopt(self, stream: RequestStream) -> None:
        """Go on with what another stream has begun, which is left empty."""
        self._mailbox, stream._over = stream._mailbox, True

    async def __anext__(self) -> RequestOutput:
        if self._over or self._waited_for:
            return await super().__anext__()  # nothing more, or a refusal
        self._reading = True
        try:
            output = await super().__anext__()
        except BaseException as error:
            self._leave(_failed(error))
            raise
        finally:
            self._reading = False
        if output.finished:
            self._leave(any(_step_failed(sample) for sample in output.outputs))
        return output

    def abort(self) -> None:
        """End the request, if it has not ended. Any thread may call this."""
        super().abort()
        if not self._reading:  # else whoever reads it learns why, and says what that says of the replica
            self._leave(None)

    def _leave(self, failed: bool | None) -> None:
        replica, self._replica = self._replica, None
        if replica is not None:
            self._replicas.release(self.request_id, replica, failed)

    def __del__(self) -> None:
        super().__del__()
        if getattr(self, "_replica", None) is not None:
            self._leave(None)


def options_by_replica(options: dict[str, Any], size: int) -> list[dict[str, Any]]:
    """The options of each replica: a device of its own on GPUs, and a seed of its own, or the replicas would draw alike.

    Raises:
        ConfigError: the size is below 1, there are too few GPUs, or an option is wrong.

    """
    if size < 1:
        raise ConfigError(f"data_parallel_size is {size}; it must be 1 or more")
    args = EngineArgs.from_options(options)
    if size > 1 and args.tensor_parallel_size > 1:
        raise ConfigError(
            f"data_parallel_size is {size} and tensor_parallel_size {args.tensor_parallel_size}; one process serves one of "
            "the two: start a server for each group of GPUs"
        )
    device = resolve_device(args.device)
    made = []
    for number in range(size):
        own = options | ({"seed": mix_seed(args.seed, number)} if number else {})
        made.append(own | ({"device": f"cuda:{number}"} if device.type == "cuda" and size > 1 else {}))
    if device.type == "cuda" and size > 1:
        _check_gpus(device.index, size)
    return made


def _check_gpus(index: int | None, size: int) -> None:
    import torch

    if index not in (None, 0):
        raise ConfigError(f"device is cuda:{index}, but replicas take the GPUs from 0 on; give cuda")
    if (count := torch.cuda.device_count()) < size:
        raise ConfigError(f"data_parallel_size is {size}, but {count} GPU(s) can be seen; each replica needs one")


def _failed(error: BaseException) -> bool | None:
    """What an error of a request says of its replica: a refusal or a reader who left says nothing."""
    if isinstance(error, RequestError):
        return None
    return True if isinstance(error, RefimplError) else None


def _step_failed(sample: CompletionOutput) -> bool:
    """Whether a sample ended because its step could not be computed. Other errors are a request's own doing."""
    return sample.finish_reason == "error" and str(sample.stop_reason).startswith(STEP_FAILED)
