"""Tally: what a simulation adds up while it runs, and the figures that come of it."""

from __future__ import annotations

from array import array
from collections import Counter
from operator import sub
from typing import Any, NamedTuple

import msgspec

from refimpl.outputs import SchedulerOutput
from refimpl.recorder import PlanTime, Recorder
from refimpl.request import Request
from refimpl.scheduler import StepUpdate


class RequestLatency(NamedTuple):
    """What a request waited for, in seconds."""

    time_to_first_token: float
    time_per_output_token: float | None
    """After the first; None where there was no second."""
    whole: float
    """From arrival to the last token."""


class Tally(Recorder):
    """A recorder that also counts. What holds during a step is weighed by the step's time."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.events.header = msgspec.structs.replace(self.events.header, started_at=0.0, clock="virtual")
        self.steps = self.prompt_tokens = self.output_tokens = self.finished = 0
        self.finished_by: Counter[str] = Counter()
        self.preempted: Counter[str] = Counter()
        """Preemptions by kind."""
        self.peak_sequences = self.peak_blocks = self.peak_waiting = 0
        self.last_end = 0.0
        """Seconds: when the last step ended."""
        self._num_blocks: int = self.events.header.config["num_blocks"]
        self._padding: set[int] = set()
        self._sequence_seconds = self._block_seconds = 0.0
        self.latencies: list[RequestLatency] = []
        """Of each request that has ended, in the order in which they ended."""
        self._gaps = array("d")

    def record(self, output: SchedulerOutput, update: StepUpdate, planned: PlanTime) -> None:
        """Count a step, and write it down if anybody would see it."""
        for ended in output.exhausted:
            self._padding.discard(ended.sequence_id)
        self._weigh(planned)
        if not output.empty:
            self.steps += 1
        for preemption in output.preempted:
            self.preempted[preemption.mode] += 1
        for ended in update.finished:
            (self._padding.add if ended.stays else self._padding.discard)(ended.sequence_id)
        if self.events.wanted:
            super().record(output, update, planned)

    def _weigh(self, planned: PlanTime) -> None:
        """A step counts from when it is planned, or the step before it ends, to its end."""
        now = self._clock()
        seconds = now - max(planned.time, self.last_end)
        self.last_end = now
        sequences = planned.num_running - len(self._padding)
        blocks = self._num_blocks - planned.num_free_blocks
        self._sequence_seconds += sequences * seconds
        self._block_seconds += blocks * seconds
        if sequences > self.peak_sequences:
            self.peak_sequences = sequences
        if blocks > self.peak_blocks:
            self.peak_blocks = blocks
        if planned.num_waiting > self.peak_waiting:
            self.peak_waiting = planned.num_waiting

    def count(self, request: Request) -> None:
        """Take in a request that has ended: its tokens, and when they came."""
        [sequence] = request.sequences
        metrics, times = request.metrics, sequence.token_times
        self.finished += 1
        self.finished_by[str(sequence.finish_reason)] += 1
        self.prompt_tokens += sequence.num_prompt_tokens
        self.output_tokens += len(times)
        if metrics.first_token_time is not None and metrics.finished_time is not None:
            self._gaps.extend(map(sub, times[1:], times))
            latency = RequestLatency(
                metrics.first_token_time - metrics.arrival_time,
                (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None,
                metrics.finished_time - metrics.arrival_time,
            )
            self.latencies.append(latency)

    def figures(self) -> dict[str, Any]:
        """Throughput in tokens a second, latencies in seconds, concurrency in sequences, use of the KV cache in shares."""
        seconds = self.last_end
        first, per_token, whole = zip(*self.latencies, strict=True) if self.latencies else ((), (), ())
        return {
            "seconds": seconds,
            "steps": self.steps,
            "finished": self.finished,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "throughput": self.output_tokens / seconds if seconds else 0.0,
            "total_throughput": (self.prompt_tokens + self.output_tokens) / seconds if seconds else 0.0,
            "concurrency_mean": self._sequence_seconds / seconds if seconds else 0.0,
            "concurrency_peak": self.peak_sequences,
            "waiting_peak": self.peak_waiting,
            **_percentiles("ttft", first),
            **_percentiles("itl", self._gaps),
            **_percentiles("tpot", [each for each in per_token if each is not None]),
            **_percentiles("latency", whole),
            "kv_use_mean": self._block_seconds / seconds / self._num_blocks if seconds else 0.0,
            "kv_use_peak": self.peak_blocks / self._num_blocks,
            "preemptions": dict(sorted(self.preempted.items())),
        }


def _percentiles(name: str, seconds: Any) -> dict[str, float | None]:
    """None where nothing was measured, such as the gaps of answers of one token."""
    import numpy as np

    levels = (50, 90, 99)
    found = np.percentile(seconds, levels).tolist() if len(seconds) else [None] * len(levels)
    return {f"{name}_p{level}": value for level, value in zip(levels, found, strict=True)}
