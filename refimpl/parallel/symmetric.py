"""All-reduce over symmetric memory: each GPU reads its peers' buffers over NVLink itself, by torch's kernels.

Sums of a few tokens are short: 64 of 8,192 numbers are 1 MiB, which NVLink moves in a few microseconds, and a library's
protocol takes longer than that. Two ways to do with less:

one_shot
    every GPU reads all of every peer's buffer and adds them up: one step, ``size`` times the bytes. For the shortest.
two_shot
    every GPU adds up its part of all buffers, then reads the others' parts: two steps, twice the bytes.

Both add in the order of the ranks, and can be recorded in CUDA graphs. NVLink's multicast is not used. Which is the fastest
for which size is a matter of measurement: ``refimpl bench all-reduce``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from refimpl.config import EngineArgs
from refimpl.errors import ConfigError
from refimpl.model_config import ModelConfig
from refimpl.parallel.collectives import Collectives

MOST_TOKENS = 256
"""Longer sums are the library's: they are bound by NVLink, and prompts make them."""
WAYS = ("one_shot", "two_shot")
_numbers = itertools.count()


class SymmetricMemory:
    """A buffer on every GPU that all of them can read.

    Args:
        store: of torch.distributed, that all ranks see.
        rank: this one's number.
        size: how many ranks there are.
        count: numbers in the buffer.
        dtype: of all sums.
        device: this rank's GPU.

    """

    def __init__(self, store: Any, rank: int, size: int, count: int, dtype: torch.dtype, device: torch.device) -> None:
        from torch._C._distributed_c10d import _SymmetricMemory

        # torch knows groups by name, in all of the process; every rank makes its engines in the same order or has one.
        self._group = f"refimpl-{next(_numbers)}"
        _SymmetricMemory.set_group_info(self._group, rank, size, store)
        self._buffer = _SymmetricMemory.empty_strided_p2p((count,), (1,), dtype, device, self._group)
        self._handle = _SymmetricMemory.rendezvous(self._buffer, self._group)

    def holds(self, x: Tensor) -> bool:
        """Whether a sum is short enough, and of the buffer's dtype."""
        return x.numel() <= self._buffer.numel() and x.dtype == self._buffer.dtype

    def one_shot(self, x: Tensor) -> Tensor:
        """The sum over the ranks, in a new tensor."""
        total: Tensor = torch.ops.symm_mem.one_shot_all_reduce_copy(self._like(x), x, "sum", self._group)
        return total

    def two_shot(self, x: Tensor) -> Tensor:
        """The same in the place of ``x``."""
        shared = self._like(x)
        shared.copy_(x)
        torch.ops.symm_mem.two_shot_all_reduce_(shared, "sum", self._group)
        return x.copy_(shared)

    def way(self, name: str) -> Callable[[Tensor], Tensor]:
        """One of ``WAYS``."""
        ways: dict[str, Callable[[Tensor], Tensor]] = {"one_shot": self.one_shot, "two_shot": self.two_shot}
        return ways[name]

    def _like(self, x: Tensor) -> Tensor:
        return self._buffer[: x.numel()].view(x.shape)


def shorten(ranks: Collectives, args: EngineArgs, config: ModelConfig, dtype: torch.dtype, store: Any) -> None:
    """Have short sums made as ``EngineArgs.all_reduce`` asks.

    Raises:
        ConfigError: the ranks are no GPUs.

    """
    if args.all_reduce not in WAYS:
        return
    if ranks.device.type != "cuda":
        raise ConfigError(f"all_reduce is {args.all_reduce!r}, which GPUs alone can do; on {ranks.device} leave it out")
    count = MOST_TOKENS * config.hidden_size
    memory = SymmetricMemory(store, ranks.rank, ranks.size, count, dtype, ranks.device)
    ranks.shorter = memory.holds, memory.way(args.all_reduce)
