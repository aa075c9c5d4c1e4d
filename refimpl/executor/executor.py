"""What an executor is: the engine's only way to a device. Local, tensor-parallel and simulated ones serve one scheduler."""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import Future
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from refimpl.errors import RefimplError
from refimpl.memory_report import MemoryPart, SettingChange
from refimpl.outputs import ModelRunnerOutput, SchedulerOutput
from refimpl.sampling_params import LogitsHooks
from refimpl.scheduler.drafting import Drafting
from refimpl.scheduler.preemption import PreemptionCosts

if TYPE_CHECKING:
    from refimpl.cache.kv_cache import KVCache


@runtime_checkable
class Executor(Protocol):
    """Computes steps in the order in which they are submitted."""

    num_blocks: int
    """Usable blocks of its KV cache."""
    num_host_blocks: int
    """Blocks of its swap space."""
    preemption_costs: PreemptionCosts | None
    """What swapping and recomputing cost there, where ``preemption_mode="auto"`` has to know."""
    drafting: Drafting | None
    """How many tokens are drafted for whom; None where none are."""
    block_bytes: int
    """Bytes of one of them, over all layers."""
    weight_bytes: int
    device_name: str
    """Where it computes, for people."""

    @property
    def memory_parts(self) -> tuple[MemoryPart, ...]:
        """The device's memory, part by part; empty where it is not known."""

    @property
    def setting_changes(self) -> tuple[SettingChange, ...]:
        """What other settings would make of the cache; empty where it is not known."""

    @property
    def logits_hooks(self) -> LogitsHooks | None:
        """Where the engine puts the hooks of requests, by sequence id; None where steps are computed in another process,
        which no hook can reach: such requests are refused.
        """

    def submit(self, scheduler_output: SchedulerOutput) -> Future[ModelRunnerOutput]:
        """Order a step. It may be computed now or later; a failure arrives with the future."""

    def close(self) -> None:
        """Stop, and give all memory back. May be called twice."""


@runtime_checkable
class HoldsKVCache(Protocol):
    """An executor whose keys and values can be looked at."""

    @property
    def kv_cache(self) -> KVCache:
        """The tensors behind the block ids."""


@runtime_checkable
class CanBeLost(Protocol):
    """An executor of other processes, which may end while this one lives: no later step can be computed then."""

    @property
    def failure(self) -> str | None:
        """Why it is lost; None while it computes. Any thread may ask."""


@runtime_checkable
class HasThreads(Protocol):
    """An executor that computes steps in threads of its own. What they call back must not wait for the engine."""

    @property
    def step_threads(self) -> Collection[int]:
        """Their identifiers."""


def step_threads_of(executor: Executor) -> Collection[int]:
    """The threads in which an executor computes, apart from the engine's."""
    return executor.step_threads if isinstance(executor, HasThreads) else ()


def is_lost(executor: Executor) -> bool:
    """Whether every further step would fail."""
    return isinstance(executor, CanBeLost) and executor.failure is not None


def kv_cache_of(executor: Executor) -> KVCache:
    """The keys and values that an executor computes.

    Raises:
        RefimplError: it computes without a model.

    """
    if not isinstance(executor, HoldsKVCache):
        raise RefimplError(f"{type(executor).__name__} computes no keys and values, so there are none to read")
    return executor.kv_cache
