"""ParallelExecutor: one model over several ranks, driven from the engine's process, which is rank 0.

::

    engine ─ SchedulerOutput ─┬─ rank 0: LocalExecutor with its share ──► tokens
                              └─ changes, msgpack over a socket ─► rank 1 … N−1: the same with theirs

Every rank applies the same changes to the same tables and computes the same step; sums and tokens go from rank to rank by
:mod:`refimpl.parallel.collectives`. What a step draws comes from rank 0 alone.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
from collections.abc import Collection
from concurrent.futures import Future
from typing import Any

import torch

from refimpl.cache.kv_cache import KVCache
from refimpl.config import EngineArgs
from refimpl.errors import ConfigError, RankFailedError
from refimpl.executor.device import resolve_device, resolve_dtype
from refimpl.executor.executor import Executor
from refimpl.executor.local import LocalExecutor
from refimpl.executor.stages import Stages
from refimpl.loading.checkpoint import Checkpoint
from refimpl.memory_report import MemoryPart, SettingChange
from refimpl.model_shares import check_size
from refimpl.outputs import ModelRunnerOutput, SchedulerOutput
from refimpl.parallel import torchrun, wire
from refimpl.parallel.collectives import Collectives, file_store, join
from refimpl.parallel.processes import Processes
from refimpl.parallel.setup import for_other_ranks, make_setup
from refimpl.parallel.symmetric import shorten
from refimpl.parallel.watch import Watch
from refimpl.sampling_params import LogitsHooks


def make_executor(args: EngineArgs, checkpoint: Checkpoint, max_model_len: int, asynchronous: bool) -> Executor:
    """The executor of these options: of one process, or of ``tensor_parallel_size``."""
    if args.tensor_parallel_size == 1:
        return LocalExecutor(args, checkpoint, max_model_len, asynchronous)
    return ParallelExecutor(args, checkpoint, max_model_len, asynchronous)


class ParallelExecutor:
    """Starts the other ranks, loads this one's share beside them, and sends them every step.

    Sizes and memory are those of rank 0; the others' are the same, and the cache has as many blocks as the rank with the
    least room for them.

    Raises:
        ConfigError: the model cannot be split so, there are fewer GPUs than ranks, or an option cannot be sent.
        OutOfMemoryError: the share or the least cache does not fit.
        RankFailedError: another rank ended or failed while it loaded; what it wrote last is in the message.

    """

    def __init__(self, args: EngineArgs, checkpoint: Checkpoint, max_model_len: int, asynchronous: bool) -> None:
        size = args.tensor_parallel_size
        self._process = os.getpid()
        check_size(checkpoint.config, size, checkpoint.name)
        devices = devices_of(args, size)
        setups = {rank: make_setup(args, rank, devices[rank], max_model_len).to_wire() for rank in range(1, size)}
        self.stages = Stages("starting the ranks")
        self._known_version = -1
        processes, store = None, None
        if torchrun.started_here():
            listener, token, store = torchrun.first_rank(size)
        else:
            processes, token = Processes(size), secrets.token_bytes(32)
            listener = socket.create_server((wire.LOOPBACK, 0), backlog=size)
        self.watch = Watch(size, setups, processes, listener, token, args.distributed_timeout_seconds)
        """The other ranks."""
        self.ranks: Collectives | None = None
        try:
            self.watch.wait_connected()
            store = file_store(processes.folder, size) if processes is not None else store
            device = torch.device(devices[0])
            self.ranks = ranks = self._join(store, size, device, loopback=processes is not None)
            self.watch.entered_here = lambda: ranks.entered
            shorten(self.ranks, args, checkpoint.config, resolve_dtype(args.dtype, device), store)
            self.watch.on_failure = self.ranks.abort
            self.stages.end()
            self._local = LocalExecutor(args, checkpoint, max_model_len, asynchronous, self.ranks)
            self.watch.wait_ready()
        except BaseException as error:
            self._give_up(error)
            raise
        self._take_over(self._local, size)

    def _join(self, store: Any, size: int, device: torch.device, loopback: bool) -> Collectives:
        """Connect with the other ranks, in a thread that can be left behind when one of them never comes."""
        joined: Future[Collectives] = Future()

        def work() -> None:
            try:
                joined.set_result(join(store, 0, size, device, loopback))
            except BaseException as error:
                joined.set_exception(error)

        threading.Thread(target=work, name="refimpl-join", daemon=True).start()
        self.watch.wait_until(joined.done)
        return joined.result()

    def _take_over(self, local: LocalExecutor, size: int) -> None:
        """What the engine wants to know is what rank 0 knows."""
        self.num_blocks, self.num_host_blocks = local.num_blocks, local.num_host_blocks
        self.preemption_costs, self.drafting = local.preemption_costs, local.drafting
        self.block_bytes, self.weight_bytes = local.block_bytes, local.weight_bytes
        self.device_name = f"{local.device_name}, on each of {size} ranks"
        self.stages.seconds |= local.stages.seconds

    @property
    def runner(self) -> Any:
        """Rank 0's."""
        return self._local.runner

    @property
    def kv_cache(self) -> KVCache:
        """Rank 0's tensors behind the block ids, of its own heads."""
        return self._local.kv_cache

    @property
    def logits_hooks(self) -> LogitsHooks | None:
        """Rank 0 draws, in this process: hooks reach it."""
        return self._local.logits_hooks

    @property
    def memory_parts(self) -> tuple[MemoryPart, ...]:
        """Rank 0's GPU."""
        return self._local.memory_parts

    @property
    def setting_changes(self) -> tuple[SettingChange, ...]:
        """What other settings would make of rank 0's cache."""
        return self._local.setting_changes

    @property
    def step_threads(self) -> Collection[int]:
        """Rank 0's."""
        return self._local.step_threads

    @property
    def failure(self) -> str | None:
        """Why the other ranks are given up; None while they live."""
        return self.watch.failure

    def submit(self, scheduler_output: SchedulerOutput) -> Future[ModelRunnerOutput]:
        """Order a step on every rank. Once a rank has failed, every step does."""
        future: Future[ModelRunnerOutput] = Future()
        try:
            self.watch.send(for_other_ranks(scheduler_output).to_wire(self._known_version))
        except Exception as error:
            future.set_exception(error)
            return future
        self._known_version = scheduler_output.batch.version
        self._local.submit(scheduler_output).add_done_callback(lambda done: self._tell(done, future))
        return future

    def _tell(self, done: Future[ModelRunnerOutput], future: Future[ModelRunnerOutput]) -> None:
        """Hand on what rank 0 computed, unless a rank failed meanwhile: then it means nothing."""
        error = done.exception()
        if isinstance(error, Exception):
            cause, error = error, RankFailedError(self.watch.why(f"rank 0 failed in a step: {error!r}"))
            error.__cause__ = cause
        elif error is not None:  # Ctrl-C in the midst of a step: the others have gone on
            self.watch.give_up("a step was interrupted on rank 0, and the other ranks cannot take it back")
        elif self.watch.failure is not None:
            error = RankFailedError(self.watch.failure)
        if error is None:
            future.set_result(done.result())
        else:
            future.set_exception(error)

    def _give_up(self, error: BaseException) -> None:
        """The construction failed: end what was started. Another rank's failure is the cause of whatever failed here."""
        in_a_collective = self.ranks is not None and isinstance(error, RuntimeError)
        why = self.watch.why(f"rank 0 failed: {error!r}") if in_a_collective else f"rank 0 failed: {error!r}"
        self.watch.give_up(why)
        self.close()
        if in_a_collective:
            raise RankFailedError(why) from error

    def close(self) -> None:
        """End steps, ranks and this rank's executor, and give all memory back. May be called twice; in a forked child
        nothing is done: all of it is its parent's.
        """
        if os.getpid() != self._process:
            return
        local: LocalExecutor | None = self.__dict__.get("_local")
        if local is not None:
            local.close()
        self.watch.close()
        if self.ranks is not None:
            self.ranks.close()
            self.ranks = None


def devices_of(args: EngineArgs, size: int) -> list[str]:
    """Each rank's device: the CPU, or one GPU after the other from the one that is asked for.

    Raises:
        ConfigError: there are fewer GPUs than ranks.

    """
    device = resolve_device(args.device)
    if device.type != "cuda":
        return [str(device)] * size
    first, count = device.index or 0, torch.cuda.device_count()
    if torchrun.started_here():
        return ["cuda:0"] + ["cuda"] * (size - 1)  # the others know their own
    if first + size > count:
        raise ConfigError(
            f"tensor_parallel_size is {size} from {device} on, but torch sees {count} GPUs here; use at most "
            f"{count - first}, device=cpu, or torchrun over several machines"
        )
    return [f"cuda:{first + rank}" for rank in range(size)]
