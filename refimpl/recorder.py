"""Recorder: from the records of one step to the line of the event log that tells it."""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import msgspec

from refimpl.cache import KVCacheManager
from refimpl.config import SchedulerConfig
from refimpl.events import SCHEMA_VERSION, ArrivalRecord, EventLog, LogHeader, StepRecord
from refimpl.executor.executor import Executor
from refimpl.outputs import NO_TOKEN, Arrival, SchedulerOutput
from refimpl.scheduler import Scheduler, StepUpdate


class PlanTime(msgspec.Struct, frozen=True, gc=False):
    """When a step was planned, and the pool and the queue right after."""

    time: float
    num_free_blocks: int
    num_running: int
    num_waiting: int


class Recorder:
    """Keeps the event log of one engine; makes no record that nobody would see."""

    def __init__(
        self,
        model: str,
        config: SchedulerConfig,
        kv: KVCacheManager,
        overlap: bool,
        capacity: int,
        clock: Callable[[], float],
        token_text: Callable[[int], str],
        executor: Executor | None = None,
        num_speculative_tokens: int = 0,
    ) -> None:
        try:
            installed = version("refimpl")
        except PackageNotFoundError:  # run from a checkout that is not installed
            installed = "unknown"
        numbers: dict[str, Any] = {
            "model": model,
            "block_size": kv.block_size,
            "num_blocks": kv.num_blocks,
            "num_host_blocks": kv.swap.num_blocks,
            "max_num_seqs": config.max_num_seqs,
            "max_num_batched_tokens": config.max_num_batched_tokens,
            "max_model_len": config.max_model_len,
            "enable_kv_cache": config.enable_kv_cache,
            "enable_prefix_caching": kv.prefix_cache is not None,
            "async_scheduling": overlap,
            "reserved_blocks": kv.reserved_blocks,
            "can_share": kv.can_share,
        }
        if executor is not None:
            numbers |= {
                "device": executor.device_name,
                "weight_bytes": executor.weight_bytes,
                "block_bytes": executor.block_bytes,
            }
        if num_speculative_tokens:
            numbers["num_speculative_tokens"] = num_speculative_tokens
        self.events = EventLog(LogHeader(SCHEMA_VERSION, installed, time.time(), "monotonic", numbers), capacity)
        self._clock = clock
        self._started_at = clock()
        self._token_text = token_text

    def plan_time(self, scheduler: Scheduler) -> PlanTime:
        """Now, and what the pool and the queue are like."""
        return PlanTime(self._clock(), scheduler.kv.num_free_blocks, len(scheduler.running), len(scheduler.waiting))

    def record(self, output: SchedulerOutput, update: StepUpdate, planned: PlanTime) -> None:
        """Write down a step, if anything happened in it and anybody would see it."""
        if not self.events.wanted:
            return
        happened = not output.empty or output.arrived or output.aborted or output.preempted or output.exhausted
        if happened or output.decisions or output.cache_changes.reset:
            self.events.append(self._step_record(output, update, planned))

    def _step_record(self, output: SchedulerOutput, update: StepUpdate, planned: PlanTime) -> StepRecord:
        batch, text = output.batch, self._token_text
        return StepRecord(
            step=output.step,
            scheduled_at=planned.time - self._started_at,
            updated_at=self._clock() - self._started_at,
            sequence_ids=batch.sequence_ids,
            slots=batch.slots,
            num_new_tokens=batch.num_new_tokens,
            token_ids=tuple(update.token_ids),
            token_texts=tuple(["" if token == NO_TOKEN else text(token) for token in update.token_ids]),
            arrived=tuple(_arrival(arrival, text) for arrival in output.arrived),
            aborted=output.aborted,
            preempted=output.preempted,
            exhausted=output.exhausted,
            admitted=tuple((a.sequence_id, a.slot, a.num_computed_tokens) for a in output.admitted),
            restarted=output.restarted,
            swapped_out=output.swapped_out,
            swapped_in=tuple((device_id, host_id) for host_id, device_id in output.swapped_in),
            finished=tuple(update.finished),
            returned=tuple(update.returned),
            copies=output.copies,
            cache_changes=output.cache_changes,
            prefix_hits=output.prefix_hits,
            forks=output.forks,
            allocated=tuple((blocks.slot, blocks.block_ids) for blocks in output.new_blocks),
            num_free_blocks=planned.num_free_blocks,
            num_running=planned.num_running,
            num_waiting=planned.num_waiting,
            beams=tuple(update.beams),
            chosen=tuple((sequence_id, token, text(token)) for sequence_id, token in update.chosen),
            decisions=output.decisions + tuple(update.decisions),
            **_drafts(output, update, text),
        )


def _drafts(output: SchedulerOutput, update: StepUpdate, text: Callable[[int], str]) -> dict[str, Any]:
    """The columns of a step with drafts."""
    if not output.batch.num_drafts:
        return {}
    checks = [update.checks.get(row) for row in range(len(output.batch.slots))]
    drafts = tuple([check.drafts if check else () for check in checks])
    return {
        "num_drafts": output.batch.num_drafts,
        "drafts": drafts,
        "draft_texts": tuple([tuple(map(text, row)) for row in drafts]),
        "num_accepted": tuple([check.num_accepted if check else 0 for check in checks]),
    }


def _arrival(arrival: Arrival, token_text: Callable[[int], str]) -> ArrivalRecord:
    return ArrivalRecord(
        request_id=arrival.request_id,
        sequence_ids=arrival.sequence_ids,
        token_ids=arrival.token_ids,
        token_texts=tuple(map(token_text, arrival.token_ids)),
    )
