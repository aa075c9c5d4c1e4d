"""What an engine did, counted up from its step records and from the metrics of its requests. Nothing here knows Prometheus.

The records come in the engine's thread, so a step must cost little: sequences that decode together took their last tokens at
the same time, and so have one gap between tokens, which is counted once with their number. While the batch stays the same
object, not even the single sequences are looked at.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise, repeat
from typing import TYPE_CHECKING

from refimpl.events import ArrivalRecord, StepRecord
from refimpl.executor.executor import is_lost
from refimpl.outputs import NO_TOKEN, Finish
from refimpl.server.histogram import Histogram
from refimpl.server.metric_names import METRICS, REASONS, lengths_up_to

if TYPE_CHECKING:
    from refimpl.engine import Engine
    from refimpl.request import Request

Labels = tuple[str, ...]
HISTOGRAMS = {metric.name: metric.buckets for metric in METRICS if metric.buckets is not None}


@dataclass(slots=True)
class _Watched:
    """A request that has not ended."""

    request: Request | None
    """None where the engine has forgotten it already."""
    begun: bool = False
    """Its first token was counted."""
    ended: bool = False


@dataclass
class Snapshot:
    """All figures of one moment."""

    values: dict[str, dict[Labels, float]] = field(default_factory=dict)
    histograms: dict[str, tuple[tuple[float, ...], list[int], float]] = field(default_factory=dict)
    """Bounds, cumulative counts, sum."""


class EngineCounts:
    """Follows one engine from now on; thread-safe.

    Args:
        engine: the engine; what it did before is not counted, but for the prefix cache's own figures.

    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        longest = lengths_up_to(engine.scheduler.config.max_model_len)
        self.histograms = {name: Histogram(bounds or longest) for name, bounds in HISTOGRAMS.items()}
        self.counters: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.accepted_at: Counter[int] = Counter()
        """Accepted drafts by their place."""
        self._block_bytes = int(engine.events.header.config.get("block_bytes", 0))
        self._most_drafts = int(engine.events.header.config.get("num_speculative_tokens", 0))
        self._lock = threading.Lock()
        self._requests: dict[int, _Watched] = {}
        """By sequence."""
        self._searches: list[_Watched] = []
        """Beam searches: their sequences come and go without a record of each."""
        self._swapped: set[int] = set()
        self._last_token: dict[int, float] = {}
        """When each sequence took its last token; those of ``_steady`` took theirs at ``_steady_at``."""
        self._steady: tuple[int, ...] | None = None
        self._steady_at = 0.0
        self.unsubscribe = engine.events.subscribe(self.apply)

    # ------------------------------------------------------------------ from records

    def apply(self, record: StepRecord) -> None:
        """Take what a step did. In the engine's thread."""
        with self._lock:
            if record.sequence_ids is self._steady and not _changes(record):
                self._go_on(record)
                return
            self._leave_steady()
            for arrival in record.arrived:
                self._arrive(arrival)
            for parent, child in record.forks:
                if child not in self._requests and (watched := self._requests.get(parent)) is not None:
                    self._requests[child] = watched
            self._moves(record)
            if record.sequence_ids:
                self._batch(record)
            for finish in (*record.aborted, *record.exhausted, *record.finished):
                self._finish(finish)
            for watched in tuple(self._searches):
                if watched.request is not None and watched.request.finished:
                    self._end(watched)

    def _go_on(self, record: StepRecord) -> None:
        """Every row of the same batch took one more token."""
        now, rows = record.updated_at, len(record.sequence_ids)
        self._observe_gap(now - self._steady_at, rows)
        self._steady_at = now
        self.counters["generation_tokens"] += rows
        self.histograms["iteration_tokens_total"].observe(sum(record.num_new_tokens))

    def _leave_steady(self) -> None:
        if self._steady is not None:
            self._last_token.update(zip(self._steady, repeat(self._steady_at), strict=False))
            self._steady = None

    def _arrive(self, arrival: ArrivalRecord) -> None:
        request = self._find(arrival)
        watched = _Watched(request)
        self._requests.update(zip(arrival.sequence_ids, repeat(watched), strict=False))
        if request is not None and request.beams is not None:
            self._searches.append(watched)

    def _find(self, arrival: ArrivalRecord) -> Request | None:
        """The request that arrived. Its id may be in use again, and of thousands aborted at once the first are forgotten."""
        for request in self.engine.known_requests(arrival.request_id):
            if request.beams is not None or request.sequences[0].sequence_id in arrival.sequence_ids:
                return request
        return None

    def _moves(self, record: StepRecord) -> None:
        """Preemptions, and blocks that go to the swap space or come back."""
        for preemption in record.preempted:
            dropped = preemption.sequence_id in self._swapped  # it had given way before; now its copy goes too
            self.counters["num_preemptions"] += not dropped
            if preemption.mode == "swap":
                self._swapped.add(preemption.sequence_id)
            else:
                self._swapped.discard(preemption.sequence_id)
        if self._swapped:
            self._swapped.difference_update(sequence_id for sequence_id, _, _ in record.admitted)
        self.counters["swapped_out"] += len(record.swapped_out)
        self.counters["swapped_in"] += len(record.swapped_in)

    def _batch(self, record: StepRecord) -> None:
        """The rows of a step: tokens that were computed and drawn, and the gaps between them."""
        self.histograms["iteration_tokens_total"].observe(sum(record.num_new_tokens))
        now, last_token, drawn = record.updated_at, self._last_token, 0
        gaps: dict[float, int] = {}
        firsts = []
        accepted = record.num_accepted or repeat(0)
        for sequence_id, token_id, num_accepted in zip(record.sequence_ids, record.token_ids, accepted, strict=False):
            came = (token_id != NO_TOKEN) + num_accepted
            if not came:
                continue
            drawn += came
            before = last_token.get(sequence_id)
            last_token[sequence_id] = now
            if before is None:
                firsts.append(sequence_id)
                before, came = now, came - 1
                if not came:
                    continue
            gaps[before] = gaps.get(before, 0) + 1
            if came > 1:
                gaps[now] = gaps.get(now, 0) + came - 1
        self.counters["generation_tokens"] += drawn
        for before, times in gaps.items():
            self._observe_gap(now - before, times)
        for sequence_id in firsts:
            self._begin(self._requests.get(sequence_id))
        if record.num_drafts:
            self._drafts(record)
        elif drawn == len(record.sequence_ids) and not record.finished:
            self._steady, self._steady_at = record.sequence_ids, now

    def _observe_gap(self, seconds: float, times: int) -> None:
        self.histograms["inter_token_latency_seconds"].observe(seconds, times)
        self.histograms["time_per_output_token_seconds"].observe(seconds, times)

    def _drafts(self, record: StepRecord) -> None:
        for drafts, num_accepted in zip(record.drafts, record.num_accepted, strict=True):
            if drafts:
                self.counters["drafts"] += 1
                self.counters["draft_tokens"] += len(drafts)
                self.counters["accepted_tokens"] += num_accepted
                self.accepted_at.update(range(num_accepted))

    # ------------------------------------------------------------------ from requests

    def _begin(self, watched: _Watched | None) -> None:
        """A request has its first token: its prompt is computed."""
        if watched is None or watched.begun or watched.request is None:
            return
        watched.begun = True
        metrics = watched.request.metrics
        self._observe("time_to_first_token_seconds", metrics.time_to_first_token)
        self.counters["prompt_tokens"] += metrics.num_prompt_tokens
        self.counters["prompt_tokens_cached"] += metrics.num_cached_tokens

    def _observe(self, name: str, value: float | None) -> None:
        if value is not None:
            self.histograms[name].observe(value)

    def _finish(self, finish: Finish) -> None:
        self._last_token.pop(finish.sequence_id, None)
        self._swapped.discard(finish.sequence_id)
        watched = self._requests.pop(finish.sequence_id, None)
        if watched is None or watched in self._searches:
            return
        if watched.request is None:
            self.reasons[finish.reason] += not watched.ended
            watched.ended = True
        elif watched.request.finished:
            self._end(watched)

    def _end(self, watched: _Watched) -> None:
        """Nothing more comes of a request."""
        request = watched.request
        if request is None or watched.ended:
            return
        watched.ended = True
        if watched in self._searches:
            self._end_search(watched, request)
        reason = reason_of(request)
        self.reasons[reason] += 1
        if reason not in ("stop", "length"):
            return
        metrics = request.metrics
        last = max((times[-1] for times in _token_times(request) if times), default=None)
        self._observe("e2e_request_latency_seconds", metrics.e2e_latency)
        self._observe("request_queue_time_seconds", metrics.queued_time)
        self._observe("request_prefill_time_seconds", _between(metrics.first_scheduled_time, metrics.first_token_time))
        self._observe("request_decode_time_seconds", _between(metrics.first_token_time, last))
        self._observe("request_inference_time_seconds", _between(metrics.first_scheduled_time, last))
        self._observe("request_time_per_output_token_seconds", _mean_gap(request))
        self._observe("request_prompt_tokens", metrics.num_prompt_tokens)
        self._observe("request_prefill_kv_computed_tokens", metrics.num_prompt_tokens - metrics.num_cached_tokens)
        self._observe("request_generation_tokens", sum(map(len, _token_times(request))))
        self._observe("request_params_max_tokens", request.max_tokens)
        self._observe("request_params_n", request.params.n if request.beams is None else len(request.sequences))

    def _end_search(self, watched: _Watched, request: Request) -> None:
        """A beam search's rows draw nothing: its tokens are those of the hypotheses that are left."""
        self._searches.remove(watched)
        for sequence_id in [one for one, of in self._requests.items() if of is watched]:
            del self._requests[sequence_id]
        self._begin(watched)
        for times in _token_times(request):
            self.counters["generation_tokens"] += len(times)
            for before, after in pairwise(times):
                self._observe_gap(after - before, 1)

    # ------------------------------------------------------------------ what it comes to

    def snapshot(self) -> Snapshot:
        """All figures as they are now. Any thread may ask; the engine's waits for some microseconds at most."""
        with self._lock:
            histograms = {name: (one.bounds, *one.cumulative()) for name, one in self.histograms.items()}
            values = self._counted()
        return Snapshot(values | self._as_it_is(), histograms)

    def _counted(self) -> dict[str, dict[Labels, float]]:
        c = self.counters
        out, back = c["swapped_out"], c["swapped_in"]
        computed = c["prompt_tokens"] - c["prompt_tokens_cached"]
        plain = ("num_preemptions", "prompt_tokens", "prompt_tokens_cached", "generation_tokens")
        counted: dict[str, dict[Labels, float]] = {name: {(): c[name]} for name in plain}
        return counted | {
            "swapped_blocks": {("out",): out, ("in",): back},
            "kv_offload_total_bytes": {
                ("GPU_to_CPU",): out * self._block_bytes,
                ("CPU_to_GPU",): back * self._block_bytes,
            },
            "prompt_tokens_by_source": {("local_compute",): computed, ("local_cache_hit",): c["prompt_tokens_cached"]},
            "spec_decode_num_drafts": {(): c["drafts"]},
            "spec_decode_num_draft_tokens": {(): c["draft_tokens"]},
            "spec_decode_num_accepted_tokens": {(): c["accepted_tokens"]},
            "spec_decode_num_accepted_tokens_per_pos": {
                (str(place),): self.accepted_at[place] for place in range(self._most_drafts)
            },
            "request_success": {(reason,): self.reasons[reason] for reason in REASONS},
        }

    def _as_it_is(self) -> dict[str, dict[Labels, float]]:
        """What is read from the engine itself: single numbers, for which no lock is needed."""
        scheduler, stats = self.engine.scheduler, self.engine.prefix_cache_stats
        kv, host = scheduler.kv, scheduler.kv.swap
        return {
            "engine_up": {(): float(self.engine.is_open and not is_lost(self.engine.executor))},
            "num_requests_running": {(): len(scheduler.running)},
            "num_requests_waiting": {(): len(scheduler.waiting)},
            "num_requests_swapped": {(): host.num_swapped},
            "kv_cache_usage_perc": {(): 1 - kv.num_free_blocks / kv.num_blocks},
            "cpu_cache_usage_perc": {(): 1 - host.num_free / host.num_blocks if host.num_blocks else 0.0},
            "prefix_cache_queries": {(): stats.queries},
            "prefix_cache_hits": {(): stats.hits},
            "prefix_cache_evictions": {(): stats.evictions},
        }


def reason_of(request: Request) -> str:
    """Why a request ended: of its samples' reasons the gravest."""
    found = {sequence.finish_reason for sequence in request.sequences}
    return next((reason for reason in reversed(REASONS) if reason in found), "stop")


def _changes(record: StepRecord) -> bool:
    """Whether a step did more than to draw a token for each row."""
    return bool(
        record.arrived
        or record.finished
        or record.aborted
        or record.exhausted
        or record.preempted
        or record.admitted
        or record.forks
        or record.num_drafts
        or record.swapped_out
        or record.swapped_in
        or NO_TOKEN in record.token_ids
    )


def _token_times(request: Request) -> list[list[float]]:
    return [sequence.token_times for sequence in request.sequences]


def _mean_gap(request: Request) -> float | None:
    spans = [(times[-1] - times[0], len(times) - 1) for times in _token_times(request) if len(times) > 1]
    count = sum(number for _, number in spans)
    return sum(span for span, _ in spans) / count if count else None


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start
