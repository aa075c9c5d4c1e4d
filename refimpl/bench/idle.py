"""The share of the time in which the GPU idles while it decodes, by torch's profiler.

Kernels and copies are intervals of the device's clock. Their union, from the first one's beginning to the last one's end, is
the time in which the device was busy; the rest is idle, in gaps that are told by their length. A few steps' intervals can
be kept as a timeline in Chrome's trace format, for https://ui.perfetto.dev or chrome://tracing.
"""

from __future__ import annotations

import gzip
import itertools
import json
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from refimpl.bench.result import Result, check, setting, workload_hash
from refimpl.bench.sides import prompt
from refimpl.bench.subject import model_or_shape
from refimpl.config import EngineArgs
from refimpl.engine import Engine
from refimpl.errors import ConfigError
from refimpl.sampling_params import SamplingParams

PROMPT = 512
WARM_UP = 20
"""Steps of decodes before those that are profiled."""
MOST_IDLE = 0.03
KEPT_STEPS = 5
"""Steps of the timeline."""
KINDS = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of the profiler's trace that are work of the device."""
LONG_GAP = 20e-6
"""Seconds. A gap of more is told of as one: between two kernels of a graph it is a microsecond or two."""


class Work(NamedTuple):
    """Something that the device did; seconds of the profiler's clock."""

    start: float
    end: float
    name: str


def run(
    engine_options: dict[str, Any],
    model_config: str | None = None,
    sequences: int = 256,
    steps: int = 200,
    timeline: Path | None = None,
) -> Result:
    """Profile ``steps`` decode steps of ``sequences`` greedy requests.

    Args:
        engine_options: of the engine; no prefix is cached, no event kept.
        model_config: a shape with random weights (llama-3-8b, or a folder with a config.json) in place of the model.
        sequences: that decode together, behind prompts of 512 tokens.
        steps: that are profiled.
        timeline: where to write what the device did in the first few of them (.json or .json.gz).

    Raises:
        ConfigError: there is no GPU, a number is out of range, or the engine takes fewer sequences at once.

    """
    if not torch.cuda.is_available():
        raise ConfigError(f"bench idle needs a GPU, and torch {torch.__version__} sees none here: a CPU has no idle device")
    if min(sequences, steps) < 1:
        raise ConfigError(f"sequences is {sequences} and steps {steps}; both must be 1 or more")
    engine_options, checkpoint = model_or_shape(engine_options, model_config)
    engine = Engine(EngineArgs.from_options(engine_options | {"enable_prefix_caching": False, "event_log_size": 0}))
    try:
        if (most := engine.scheduler.config.max_num_seqs) < sequences:
            raise ConfigError(f"sequences is {sequences} and max_num_seqs {most}; raise max_num_seqs, or ask for fewer")
        _fill(engine, sequences, steps)
        work = profiled(engine, steps)
    finally:
        engine.close()
    if timeline is not None:
        write_timeline(work, steps, timeline)
    figures = figures_of(work, steps)
    return Result(
        topic="idle",
        setting=setting(
            checkpoint,
            dtype=engine_options["dtype"],
            workload=f"{steps} decode steps of {sequences} sequences, prompts of {PROMPT} tokens, greedy",
            workload_hash=workload_hash([sequences, steps, PROMPT]),
            tokens_produced=sequences * steps,
        ),
        results={"sequences": sequences, "steps": steps, **figures},
        checks=[check("device_idle_share", figures["idle_share"], "<=", MOST_IDLE)],
    )


def _fill(engine: Engine, sequences: int, steps: int) -> None:
    """Have all sequences decode, and let them for a while."""
    output = steps + sequences + 4 * WARM_UP  # the first to run must not end before the last was measured
    for number in range(sequences):
        params = SamplingParams(
            temperature=0, max_tokens=output, ignore_eos=True, detokenize=False, output_kind="final_only"
        )
        engine.add_request(str(number), prompt(PROMPT, number, engine.model_config.vocab_size), params)
    while len(engine.scheduler.waiting) or any(not s.output_token_ids for s in engine.scheduler.running):
        engine.step()
    for _ in range(WARM_UP):
        engine.step()


def profiled(engine: Engine, steps: int) -> list[Work]:
    """What the device did during so many steps, by the time of its beginning."""
    activity = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CUDA]) as profiler:
        for _ in tqdm(range(steps), desc="profiled steps", leave=False, disable=None):
            engine.step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    found = (
        Work(event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6, event["name"])
        for event in events
        if event.get("cat") in KINDS and "dur" in event
    )
    return sorted(found)


def gaps_of(work: Sequence[Work]) -> list[float]:
    """The lengths of the times in which nothing ran, between the first beginning and the last end."""
    ends = itertools.accumulate((one.end for one in work), max)
    return [later.start - end for end, later in zip(ends, work[1:], strict=False) if later.start > end]


def figures_of(work: Sequence[Work], steps: int) -> dict[str, Any]:
    """The idle share, its gaps, and which work the device was busy with."""
    gaps = gaps_of(work)
    span = max(one.end for one in work) - work[0].start
    idle, long = sum(gaps), [gap for gap in gaps if gap > LONG_GAP]
    return {
        "idle_share": idle / span,
        "seconds_per_step": span / steps,
        "launches_per_step": len(work) / steps,
        "long_gaps_per_step": len(long) / steps,
        "idle_share_in_long_gaps": sum(long) / span,
        "longest_gap_seconds": max(gaps, default=0.0),
        "by_name": _by_name(work, span - idle),
    }


def _by_name(work: Iterable[Work], busy: float, most: int = 12) -> list[dict[str, Any]]:
    """The kernels that took longest, with their share of the busy time."""
    found: dict[str, list[float]] = {}
    for one in work:
        found.setdefault(one.name[:80], []).append(one.end - one.start)
    longest = sorted(found.items(), key=lambda item: -sum(item[1]))[:most]
    return [
        {"name": name, "launches": len(seconds), "share": sum(seconds) / busy, "mean_seconds": sum(seconds) / len(seconds)}
        for name, seconds in longest
    ]


def write_timeline(work: Sequence[Work], steps: int, path: Path) -> None:
    """Write what the device did in the first :data:`KEPT_STEPS` steps, as a trace of one row."""
    start = work[0].start
    until = start + (work[-1].end - start) * min(1.0, KEPT_STEPS / steps)
    events = [
        {"name": one.name[:80], "cat": "kernel", "ph": "X", "pid": 0, "tid": 0}
        | {"ts": round(1e6 * (one.start - start), 3), "dur": round(1e6 * (one.end - one.start), 3)}
        for one in work
        if one.start < until
    ]
    text = json.dumps({"displayTimeUnit": "ms", "traceEvents": events}, separators=(",", ":"))
    path.write_bytes(gzip.compress(text.encode(), mtime=0) if path.suffix == ".gz" else text.encode())
