"""What paging saves: the requests of a real trace in a paged cache and in a contiguous one of its size, without a model.

Shares are of slot-time: each step counts the slots that sequences hold, and those of them that hold a token.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tqdm import tqdm

from refimpl.bench.model_free import run_model_free
from refimpl.bench.result import Result, check, setting, workload_hash
from refimpl.bench.traces import TraceRequest, generate, read_trace
from refimpl.config import EngineArgs
from refimpl.errors import RefimplError
from refimpl.outputs import SchedulerOutput
from refimpl.scheduler import Scheduler

BLOCK_SIZE = 16
MAX_MODEL_LEN = 4_096
RESERVATIONS = 40
"""Sequences that a contiguous cache of the pool's size holds."""
NUM_BLOCKS = RESERVATIONS * MAX_MODEL_LEN // BLOCK_SIZE


def run(trace: Path | None = None, name: str = "conv", count: int = 19_366, seed: int = 0) -> Result:
    """Serve a trace from a file, or ``count`` requests generated with its lengths, once with each kind of cache."""
    requests = read_trace(trace) if trace is not None else generate(name, count, seed)
    fitting = [request for request in requests if request.prompt + request.output <= MAX_MODEL_LEN]
    if not fitting:
        raise RefimplError(f"none of the trace's {len(requests)} requests fits {MAX_MODEL_LEN} tokens of prompt and output")
    figures = {kind: _serve(kind, fitting) for kind in ("paged", "contiguous")}
    paged, contiguous = figures["paged"], figures["contiguous"]
    source = f"the trace {trace.name}" if trace is not None else f"{name!r} lengths, seed {seed}"
    return Result(
        topic="memory",
        setting=setting(
            model="no model",
            model_hash="none",
            dtype="integers",
            workload=f"{len(fitting):,} requests of {source}, at most {MAX_MODEL_LEN:,} tokens each; "
            f"a pool of {RESERVATIONS} × {MAX_MODEL_LEN:,} tokens in blocks of {BLOCK_SIZE}",
            workload_hash=workload_hash([(request.prompt, request.output) for request in fitting]),
            tokens_produced=2 * sum(request.output for request in fitting),
        ),
        results=figures | {"requests": len(requests), "fitting": len(fitting), "pool_blocks": NUM_BLOCKS},
        checks=[
            check("paged_waste", paged["waste"], "<=", 0.008),
            check("paged_most_wasted_slots_of_a_sequence", paged["most_wasted_slots"], "<=", BLOCK_SIZE - 1),
            check("contiguous_use", contiguous["use"], ">=", 0.26),
            check("contiguous_use_at_most", contiguous["use"], "<=", 0.30),
            check("contiguous_peak_sequences", contiguous["peak_sequences"], "<=", RESERVATIONS),
            check("paged_peak_over_contiguous", paged["peak_sequences"] / contiguous["peak_sequences"], ">=", 110 / 40),
        ],
    )


def _serve(kind: str, requests: list[TraceRequest]) -> dict[str, Any]:
    """Serve all requests with one kind of cache; only memory limits how many run at once."""
    args = EngineArgs(
        kv_cache_manager=kind,
        block_size=BLOCK_SIZE,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=NUM_BLOCKS,
        max_num_batched_tokens=NUM_BLOCKS,
        enable_prefix_caching=False,
    )
    slot_time = _SlotTime()
    lengths = ((request.prompt, request.output) for request in tqdm(requests, desc=kind, unit="request", leave=False))
    run_model_free(args, NUM_BLOCKS, lengths, slot_time.add)
    return slot_time.figures()


class _SlotTime:
    """Sums over steps."""

    def __init__(self) -> None:
        self.held = self.filled = self.steps = self.sequence_steps = self.peak = self.most_wasted = self.preemptions = 0

    def add(self, scheduler: Scheduler, planned: SchedulerOutput) -> None:
        """Count a step as it is planned."""
        usage = scheduler.usage()
        self.steps += 1
        self.held += usage.used_blocks * BLOCK_SIZE
        self.filled += usage.filled_slots
        self.sequence_steps += usage.num_sequences
        self.peak = max(self.peak, usage.num_sequences)
        self.preemptions += len(planned.preempted)
        for sequence in scheduler.running:
            wasted = scheduler.kv.num_slots(sequence.sequence_id) - sequence.num_computed_tokens
            self.most_wasted = max(self.most_wasted, wasted)

    def figures(self) -> dict[str, Any]:
        """Shares of slot-time, sequences, steps."""
        return {
            "use": self.filled / self.held,
            "waste": 1 - self.filled / self.held,
            "most_wasted_slots": self.most_wasted,
            "peak_sequences": self.peak,
            "mean_sequences": self.sequence_steps / self.steps,
            "steps": self.steps,
            "preemptions": self.preemptions,
        }
