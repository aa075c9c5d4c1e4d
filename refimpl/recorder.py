"""From the records of one step to the line of the event log that tells it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from refimpl.events import ArrivalRecord, StepRecord
from refimpl.outputs import NO_TOKEN, Arrival, SchedulerOutput
from refimpl.scheduler.scheduler import StepUpdate


@dataclass(frozen=True)
class PlanTime:
    """When a step was planned, and the pool and the queue right after."""

    time: float
    num_free_blocks: int
    num_running: int
    num_waiting: int


def record_step(
    scheduler_output: SchedulerOutput,
    update: StepUpdate,
    planned: PlanTime,
    updated_at: float,
    started_at: float,
    token_text: Callable[[int], str],
) -> StepRecord:
    """The record of a step. Times in are seconds of the engine's clock; times in the record count from ``started_at``."""
    batch = scheduler_output.batch
    return StepRecord(
        step=scheduler_output.step,
        scheduled_at=planned.time - started_at,
        updated_at=updated_at - started_at,
        sequence_ids=batch.sequence_ids,
        slots=batch.slots,
        num_new_tokens=batch.num_new_tokens,
        token_ids=tuple(update.token_ids),
        token_texts=tuple("" if token == NO_TOKEN else token_text(token) for token in update.token_ids),
        arrived=tuple(_arrival(arrival, token_text) for arrival in scheduler_output.arrived),
        aborted=scheduler_output.aborted,
        preempted=scheduler_output.preempted,
        exhausted=scheduler_output.exhausted,
        admitted=tuple((a.sequence_id, a.num_computed_tokens) for a in scheduler_output.admitted),
        restarted=scheduler_output.restarted,
        finished=tuple(update.finished),
        allocated=tuple((blocks.slot, blocks.block_ids) for blocks in scheduler_output.new_blocks),
        num_free_blocks=planned.num_free_blocks,
        num_running=planned.num_running,
        num_waiting=planned.num_waiting,
        decisions=scheduler_output.decisions + tuple(update.decisions),
    )


def _arrival(arrival: Arrival, token_text: Callable[[int], str]) -> ArrivalRecord:
    return ArrivalRecord(
        request_id=arrival.request_id,
        sequence_ids=arrival.sequence_ids,
        token_ids=arrival.token_ids,
        token_texts=tuple(map(token_text, arrival.token_ids)),
    )
