"""A service simulated without a network: requests come by the clock, and the engine is stepped in a loop.

The loop is open: requests come at their times however busy the engine is, and those that have come are added between two
steps. So the time to the first token counts what is left of the step in which a request came. By default arrivals are a
Poisson process and requests are those of :mod:`refimpl.bench.offline`'s ``mixed-N``; vLLM was measured with the same
(:mod:`refimpl.bench.measured`), and the figures stand beside its own.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from refimpl.bench import measured
from refimpl.bench.arrivals import arrival_times
from refimpl.bench.compilations import counted
from refimpl.bench.offline import requests_of, within_vocabulary
from refimpl.bench.request_times import SHARES, RequestTimes, goodput, summary
from refimpl.bench.result import Check, Result, check, setting, workload_hash
from refimpl.bench.rows import DoesNotFit, Figures, Rows
from refimpl.bench.sides import prompt
from refimpl.bench.subject import model_or_shape
from refimpl.bench.traces import read_trace
from refimpl.config import EngineArgs
from refimpl.engine import Engine
from refimpl.errors import ConfigError
from refimpl.loading.checkpoint import Checkpoint
from refimpl.sampling_params import SamplingParams

RATES = (10.0, 20.0, 30.0)
WARM_UP_TOKENS = 8
"""Output tokens of the requests that run before anything is measured."""
MOST_WARM_UP = 64
"""So many of them at most."""


@dataclass(frozen=True)
class Arrival:
    """A request and when it comes."""

    at: float
    """Seconds from the start."""
    prompt: list[int]
    output: int
    """Tokens; the end-of-text token is ignored."""


@dataclass(frozen=True)
class Pattern:
    """Which requests come, and when."""

    rates: Sequence[float] = RATES
    """Arrivals a second; each is a row of its own."""
    seconds: float = measured.SECONDS
    """How long requests keep coming. Their answers are waited for."""
    seed: int = measured.SEED
    burstiness: float = 1.0
    scale: float = 1.0
    """Of the lengths, at most 1."""
    trace: Path | None = None
    """In place of all this but the seconds: arrivals and lengths of a trace."""

    @property
    def as_measured(self) -> bool:
        """Whether requests are those that vLLM was measured with, but for the rate."""
        return self == Pattern(rates=self.rates)

    def rows(self, vocab_size: int) -> dict[str, list[Arrival]]:
        """The arrivals of every row by its name.

        Raises:
            ConfigError: a number is out of range, or nobody comes.
            RefimplError: the trace cannot be read.

        """
        if not 0 < self.scale <= 1:
            raise ConfigError(f"scale is {self.scale:g}; it must be over 0 to 1")
        if self.trace is not None:
            return {"trace": self._of_trace(self.trace, vocab_size)}
        kind = "poisson" if self.burstiness == 1 else "gamma"
        return {f"{kind}-{rate:g}": self._drawn(rate, vocab_size) for rate in self.rates}

    def _drawn(self, rate: float, vocab_size: int) -> list[Arrival]:
        times = arrival_times(rate, self.seconds, self.seed, self.burstiness)
        requests = within_vocabulary(requests_of(f"mixed-{len(times)}", self.scale), vocab_size)
        return [Arrival(at, ids, output) for at, (ids, output) in zip(times, requests, strict=True)]

    def _of_trace(self, path: Path, vocab_size: int) -> list[Arrival]:
        rows = [row for row in read_trace(path) if row.arrival <= self.seconds]
        lengths = [(max(1, round(row.prompt * self.scale)), max(1, round(row.output * self.scale))) for row in rows]
        return [
            Arrival(row.arrival, prompt(tokens, number, vocab_size), output)
            for number, (row, (tokens, output)) in enumerate(zip(rows, lengths, strict=True))
        ]


def run(
    engine_options: dict[str, Any],
    pattern: Pattern | None = None,
    model_config: str | None = None,
    limits: tuple[float, float] = (0.2, 0.05),
    max_minutes: float | None = None,
) -> Result:
    """Serve the arrivals of every row, one row after the other, in one engine.

    Args:
        engine_options: of the engine; no prefix is cached, no event kept.
        pattern: what comes when.
        model_config: a shape with random weights (llama-3-8b, or a folder with a config.json) in place of the model.
        limits: of goodput, in seconds: time to the first token, and time per output token.
        max_minutes: for everything; rows that no time is left for say so.

    Raises:
        ConfigError: a name or number is out of range, or a request is longer than the engine serves.

    """
    pattern = pattern or Pattern()
    engine_options, checkpoint = model_or_shape(engine_options, model_config)
    rows_of = pattern.rows(checkpoint.config.vocab_size)
    peers = vllm_figures() if pattern.as_measured and beside_vllm(engine_options, model_config) else {}
    rows = Rows(list(rows_of), _tell, max_minutes)
    engine = Engine(EngineArgs.from_options(engine_options | {"enable_prefix_caching": False, "event_log_size": 0}))
    try:
        for arrivals in rows_of.values():
            _check_lengths(arrivals, engine.scheduler.config.max_model_len)
        with rows.kept_when_interrupted():
            for name, arrivals in rows_of.items():
                figures = rows.measure(name, partial(_measure, engine, name, arrivals, limits))
                if figures is not None and name in peers:
                    figures["beside"] = {"vLLM 0.23.0": peers[name]}
    finally:
        engine.close()
    return Result(
        topic="serve_sim",
        setting=_setting(engine_options, checkpoint, pattern, rows_of, rows.measured()),
        results=rows.all(),
        checks=_checks(rows.measured()),
    )


def _setting(
    engine_options: dict[str, Any],
    checkpoint: Checkpoint,
    pattern: Pattern,
    rows_of: dict[str, list[Arrival]],
    found: dict[str, Figures],
) -> dict[str, Any]:
    came = f"the trace {pattern.trace.name}" if pattern.trace else "64 to 1,024 tokens in, 16 to 512 out"
    shrunk = "" if pattern.scale == 1 else f", lengths × {pattern.scale:g}"
    bursts = "" if pattern.burstiness == 1 or pattern.trace else f", burstiness {pattern.burstiness:g}"
    return setting(
        checkpoint,
        dtype=engine_options["dtype"],
        workload=f"open loop for {pattern.seconds:g} seconds{bursts}: {came}{shrunk}; greedy, no prefix cache",
        workload_hash=workload_hash(
            {name: [(one.at, one.prompt, one.output) for one in arrivals] for name, arrivals in rows_of.items()}
        ),
        tokens_produced=sum(row["output_tokens"] for row in found.values()),
    )


def _check_lengths(arrivals: list[Arrival], max_model_len: int) -> None:
    longest = max(len(one.prompt) + one.output for one in arrivals)
    if longest > max_model_len:
        raise ConfigError(
            f"a request of this workload has {longest:,} tokens with its answer, and the engine serves {max_model_len:,} "
            f"(max_model_len, or the model's own limit); shrink all lengths, as by --scale {max_model_len / longest:.2g}"
        )


def _tell(figures: Figures) -> str:
    ttft, tpot = (f"{1e3 * figures[name]['p50']:,.1f} ms" for name in ("ttft", "tpot"))
    return f"first token {ttft}, each further one {tpot}, {figures['output_tokens_per_second']:,.0f} output tokens/s"


def _measure(engine: Engine, name: str, arrivals: list[Arrival], limits: tuple[float, float], at_most: float) -> Figures:
    if arrivals[-1].at > at_most:
        raise DoesNotFit(f"its requests come for {arrivals[-1].at:.0f} seconds, and {at_most:.0f} were left for it")
    _warm_up(engine, arrivals)
    with counted() as compilations:
        times, seconds = serve(engine, arrivals, name)
    asked = sum(one.output for one in arrivals)
    return summary(times, seconds) | {
        "goodput": goodput(times, seconds, *limits),
        "tokens_missing": asked - sum(one.tokens for one in times),
        "kernels_compiled_meanwhile": compilations.compiled,
    }


def _warm_up(engine: Engine, arrivals: list[Arrival]) -> None:
    """Some of the requests, a few tokens each: what an engine does at its first steps is no part of what is measured."""
    some = arrivals[: min(MOST_WARM_UP, math.ceil(len(arrivals) / 4))]
    serve(engine, [Arrival(0.0, one.prompt, min(one.output, WARM_UP_TOKENS)) for one in some])


def serve(engine: Engine, arrivals: Sequence[Arrival], shown_as: str | None = None) -> tuple[list[RequestTimes], float]:
    """Add requests as they come, step until the last is served; when their tokens came, and the seconds it took.

    ``arrivals`` rise. A request's times count from the moment in which it should have come, so a step that kept the loop
    from adding it counts too. ``shown_as`` names the progress bar, if there shall be one.
    """
    times = [RequestTimes(one.at) for one in arrivals]
    come = finished = 0
    started = time.perf_counter()
    with tqdm(total=len(arrivals), desc=shown_as, unit="request", leave=False, disable=shown_as is None or None) as bar:
        while finished < len(arrivals):
            now = time.perf_counter() - started
            while come < len(arrivals) and arrivals[come].at <= now:
                _add(engine, str(come), arrivals[come])
                come += 1
            until_next = arrivals[come].at - now if come < len(arrivals) else math.inf
            if not engine.has_unfinished_requests():
                time.sleep(max(0.0, until_next))
                continue
            if (wait := min(engine.due_in(), until_next)) > 0:
                time.sleep(wait)
                continue
            outputs = engine.step()
            now = time.perf_counter() - started
            for output in outputs:
                times[int(output.request_id)].came(now, sum(len(sample.token_ids) for sample in output.outputs))
                finished += output.finished
                bar.update(output.finished)
    return times, time.perf_counter() - started


def _add(engine: Engine, request_id: str, one: Arrival) -> None:
    params = SamplingParams(temperature=0, max_tokens=one.output, ignore_eos=True, detokenize=False, output_kind="delta")
    engine.add_request(request_id, one.prompt, params)


def _checks(found: dict[str, Figures]) -> list[Check]:
    """All tokens came; and where vLLM was measured of the same, no user waits longer than with it."""
    checks = []
    for name, row in found.items():
        named = name.replace("-", "")
        checks.append(check(f"{named}_tokens_missing", row["tokens_missing"], "<=", 0))
        for theirs in row.get("beside", {}).values():
            checks += [
                check(f"{named}_{figure}_{share}_8b", row[figure][share], "<=", theirs[figure][share])
                for figure in ("ttft", "tpot")
                for share in ("p50", "p90")  # of two hundred requests the p99 is the second longest: one unlucky arrival
            ]
    return checks


def vllm_figures() -> dict[str, Figures]:
    """What was measured of vLLM, by the names of our rows."""
    return {
        f"poisson-{one.rate}": {
            "output_tokens_per_second": one.output_tokens_per_second,
            "ttft": dict(zip(SHARES, one.ttft, strict=True)),
            "tpot": dict(zip(SHARES, one.tpot, strict=True)),
            "widest_gap": dict(zip(SHARES, one.widest_gap, strict=True)),
        }
        for one in measured.POISSON_RUNS
    }


def beside_vllm(engine_options: dict[str, Any], model_config: str | None) -> bool:
    """Whether this is the model, dtype and hardware that vLLM's figures are of."""
    return (
        model_config == "llama-3-8b"
        and engine_options["dtype"] in ("bfloat16", "auto")
        and torch.cuda.is_available()
        and "H200" in torch.cuda.get_device_name()
    )
