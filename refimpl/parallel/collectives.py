"""Collectives: what crosses the ranks, by torch.distributed's NCCL (between GPUs) or gloo (between processes on a CPU).

Tensors alone: nothing is pickled, and torch's default process group is not touched, so that a notebook may have its own, and
several engines one each. A step sends::

    embedding        all-reduce   [T, H]          } 2 · layers + 1 times
    layer: o_proj    all-reduce   [T, H]          }
    layer: down      all-reduce   [T, H]          }
    logits           all-gather   [R, V / size]   of the rows that draw
    tokens           broadcast    [R]             what rank 0 drew

On a GPU a collective is a kernel on the current stream like any other: it can be recorded in a CUDA graph, and the host
waits for none. All ranks must make the same calls in the same order.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from refimpl.parallel import torchrun
from refimpl.parallel.wire import LOOPBACK

c10d: Any = torch.distributed.distributed_c10d
"""Its names come and go with what torch was built with."""
NCCL_SETTINGS = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
"""torch's own watch over NCCL ends the process, which may be somebody's notebook. A dead or stuck rank is found by ours."""
ONE_OPERATION = timedelta(days=7)
"""After which a collective gives up by itself, even if all ranks have entered it. Who watches the ranks notices long before,
and says which of them the others wait for.
"""


@dataclass
class Traffic:
    """Collectives that this process called, and the bytes that it put into them. Those inside CUDA graphs count when they
    are recorded.
    """

    all_reduces: int = 0
    all_reduce_bytes: int = 0
    gathers: int = 0
    gather_bytes: int = 0
    broadcasts: int = 0
    broadcast_bytes: int = 0


class Collectives:
    """One rank's end of a process group: :class:`refimpl.ranks.Ranks`.

    Args:
        backend: of torch.distributed, connected.
        device: where its tensors are.
        here: how many of the ranks run on this machine.

    """

    def __init__(self, backend: Any, device: torch.device, here: int) -> None:
        self.rank: int = backend.rank()
        self.size: int = backend.size()
        self.here = here
        self.device = device
        self.traffic = Traffic()
        self.entered = 0
        """Collectives that this rank has entered: the same number on every rank that is as far."""
        self.shorter: tuple[Callable[[Tensor], bool], Callable[[Tensor], Tensor]] | None = None
        """For which sums there is a shorter way, and that way."""
        self._backend = backend
        self._muted = False
        self._sum, self._min = _on_this_stream(c10d.AllreduceOptions()), _on_this_stream(c10d.AllreduceOptions())
        self._sum.reduceOp, self._min.reduceOp = c10d.ReduceOp.SUM, c10d.ReduceOp.MIN
        self._from_first = _on_this_stream(c10d.BroadcastOptions())
        self._from_first.rootRank = 0
        self._gather = _on_this_stream(c10d.AllgatherOptions())

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over the ranks, in the place of ``x`` if that is contiguous."""
        x = x.contiguous()
        self.traffic.all_reduces += 1
        self.traffic.all_reduce_bytes += x.nbytes
        if not self._enters():
            return x
        if self.shorter is not None and self.shorter[0](x):
            return self.shorter[1](x)
        self._backend.allreduce([x], self._sum).wait()
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """What every rank has, ``[size, *x.shape]``."""
        x = x.contiguous()
        self.traffic.gathers += 1
        self.traffic.gather_bytes += x.nbytes
        if not self._enters():
            return x.unsqueeze(0).expand(self.size, *x.shape)
        found = x.new_empty(self.size * len(x), *x.shape[1:])
        self._backend._allgather_base(found, x, self._gather).wait()
        return found.view(self.size, *x.shape)

    def broadcast(self, x: Tensor) -> Tensor:
        """What rank 0 has, in the place of ``x`` if that is contiguous."""
        x = x.contiguous()
        self.traffic.broadcasts += 1
        self.traffic.broadcast_bytes += x.nbytes
        if self._enters():
            self._backend.broadcast([x], self._from_first).wait()
        return x

    def least(self, value: int) -> int:
        """The least of the ranks' values. The host waits for it."""
        values = torch.tensor([value], dtype=torch.int64, device=self.device)
        if self._enters():
            self._backend.allreduce([values], self._min).wait()
        return int(values)

    def _enters(self) -> bool:
        """Whether a collective is made with the others; if so, this rank has entered one more."""
        self.entered += not self._muted
        return not self._muted

    @contextlib.contextmanager
    def muted(self) -> Iterator[None]:
        """Within the block nothing is sent."""
        before, self._muted = self._muted, True
        try:
            yield
        finally:
            self._muted = before

    def abort(self) -> None:
        """End every collective that is under way, with an error or without a result, from any thread."""
        with contextlib.suppress(Exception):  # not every backend can, and those that fail are ended otherwise
            self._backend.abort()

    def close(self) -> None:
        """Give sockets and memory back. Nothing may be under way."""
        self.shorter = None
        if self.device.type == "cuda":
            self.abort()
        self._backend = None


def _on_this_stream(options: Any) -> Any:
    """Options by which NCCL computes on the stream that is current, not beside it."""
    if hasattr(options, "asyncOp"):
        options.asyncOp = False
    return options


def file_store(folder: Path, size: int) -> Any:
    """A file in a private folder by which ``size`` ranks of one machine find each other."""
    return torch._C._distributed_c10d.FileStore(str(folder / "store"), size)


def join(store: Any, rank: int, size: int, device: torch.device, loopback: bool = True) -> Collectives:
    """Connect with the other ranks, which do the same; waits for all of them.

    Args:
        store: of torch.distributed, that all ranks see: where they find each other.
        rank: from 0 to ``size`` - 1.
        size: how many there are.
        device: where this rank computes.
        loopback: whether all are on this machine, so that gloo need not listen to others.

    """
    here = size if loopback else torchrun.ranks_here(size)
    if device.type == "cuda":
        return _connected(_nccl(store, rank, size), device, here)
    options = c10d.ProcessGroupGloo._Options()
    options._timeout = ONE_OPERATION
    make = c10d.ProcessGroupGloo.create_device
    options._devices = [make(hostname=LOOPBACK) if loopback else c10d.ProcessGroupGloo.create_default_device()]
    return _connected(c10d.ProcessGroupGloo(store, rank, size, options), device, here)


def _nccl(store: Any, rank: int, size: int) -> Any:
    options = c10d.ProcessGroupNCCL.Options()
    options._timeout = ONE_OPERATION
    with _environment(NCCL_SETTINGS):
        return c10d.ProcessGroupNCCL(store, rank, size, options)


@contextlib.contextmanager
def _environment(settings: dict[str, str]) -> Iterator[None]:
    """Environment variables for what reads them within the block, unless they are set."""
    missing = settings.keys() - os.environ.keys()
    os.environ.update({name: settings[name] for name in missing})
    try:
        yield
    finally:
        for name in missing:
            del os.environ[name]


def _connected(backend: Any, device: torch.device, here: int) -> Collectives:
    """The first collective makes the connections, and NCCL's buffers: before anything else takes memory."""
    ranks = Collectives(backend, device, here)
    ranks.least(0)
    return ranks
