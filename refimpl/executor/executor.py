"""What an executor is: the engine's only way to a device. Local, tensor-parallel and simulated ones serve one scheduler."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Protocol, runtime_checkable

from refimpl.outputs import ModelRunnerOutput, SchedulerOutput
from refimpl.scheduler.preemption import PreemptionCosts


@runtime_checkable
class Executor(Protocol):
    """Computes steps in the order in which they are submitted."""

    num_blocks: int
    """Usable blocks of its KV cache."""
    num_host_blocks: int
    """Blocks of its swap space."""
    preemption_costs: PreemptionCosts | None
    """What swapping and recomputing cost there, where ``preemption_mode="auto"`` has to know."""
    block_bytes: int
    """Bytes of one of them, over all layers."""
    weight_bytes: int
    device_name: str
    """Where it computes, for people."""

    def submit(self, scheduler_output: SchedulerOutput) -> Future[ModelRunnerOutput]:
        """Order a step. It may be computed now or later; a failure arrives with the future."""

    def close(self) -> None:
        """Stop, and give all memory back. May be called twice."""
