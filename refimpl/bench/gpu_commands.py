"""The commands of ``refimpl bench`` whose figures are a GPU's first of all, and the one that runs them all."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from refimpl.bench.app import AsJson, MaxMinutes, ModelConfig, Save, bench
from refimpl.cli_checks import above_zero, can_be_written
from refimpl.cli_options import with_engine_options
from refimpl.errors import ConfigError

if TYPE_CHECKING:
    from refimpl.bench.result import Result

OF_SCALING = (
    "model", "load_format", "quantization", "tensor_parallel_size", "all_reduce", "enforce_eager", "speculative_config",
    "enable_prefix_caching", "event_log_size",
)  # fmt: skip
"""Engine options that ``refimpl bench scaling`` has in its own hands."""


@bench.command()
def kernels(
    names: Annotated[list[str] | None, typer.Argument(help="Kernels to measure; all, if none is named.")] = None,
    *,
    repeats: Annotated[int, typer.Option(min=1, help="Replays of which the median is taken.")] = 20,
    compare: Annotated[
        str, typer.Option(help="flash-attn (whichever is installed, beside our attention), or none.")
    ] = "none",
    as_json: AsJson = False,
    save: Save = None,
) -> None:
    """Every GPU kernel: microseconds, bytes, and its share of the ceiling measured in the same run. Needs a GPU."""
    from refimpl.bench.kernels import run
    from refimpl.bench.result import report_result

    if compare not in ("flash-attn", "none"):
        raise ConfigError(f"compare is {compare!r}; it must be flash-attn or none")
    report_result(run(names or (), repeats=repeats, compare=compare == "flash-attn"), as_json, save)


@bench.command("serve-sim")
@with_engine_options
def serve_sim(
    *,
    model_config: ModelConfig = None,
    request_rate: Annotated[str, typer.Option(help="Arrivals a second, by commas; each is a row.")] = "10,20,30",
    seconds: Annotated[float, typer.Option(callback=above_zero, help="How long requests keep coming.")] = 20.0,
    burstiness: Annotated[
        float, typer.Option(help="Shape of the gaps' gamma distribution: 1 is Poisson, less makes bursts, more is even.")
    ] = 1.0,
    arrival_seed: Annotated[int | None, typer.Option(help="Of the gaps; vLLM was measured with the default.")] = None,
    scale: Annotated[float, typer.Option(callback=above_zero, help="Shrink all lengths by this.")] = 1.0,
    trace: Annotated[
        Path | None,
        typer.Option(help="Instead: arrivals and lengths of a CSV with TIMESTAMP, ContextTokens, GeneratedTokens."),
    ] = None,
    goodput: Annotated[str, typer.Option(help="Limits in milliseconds that a good request keeps.")] = "ttft:200,tpot:50",
    max_minutes: MaxMinutes = None,
    as_json: AsJson = False,
    save: Save = None,
    engine_options: dict[str, Any],
) -> None:
    """Requests that come by the clock, into the engine itself: first tokens, time per token, gaps, goodput."""
    from refimpl.bench.result import report_result
    from refimpl.bench.serve_sim import Pattern, run

    given: dict[str, Any] = {} if arrival_seed is None else {"seed": arrival_seed}
    pattern = Pattern(_numbers(request_rate), seconds, burstiness=burstiness, scale=scale, trace=trace, **given)
    report_result(run(engine_options, pattern, model_config, limits_of(goodput), max_minutes), as_json, save)


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(number) for number in text.split(","))
    except ValueError as error:
        raise ConfigError(f"request_rate is {text!r}; give numbers by commas, such as 10,20,30") from error


def limits_of(text: str) -> tuple[float, float]:
    """Seconds of ``ttft:MS,tpot:MS``."""
    try:
        given = {name: float(number) / 1e3 for name, number in (part.split(":") for part in text.split(","))}
        if given.keys() != {"ttft", "tpot"}:
            raise ValueError
    except ValueError as error:
        raise ConfigError(f"goodput is {text!r}; give both limits in milliseconds, such as ttft:200,tpot:50") from error
    return given["ttft"], given["tpot"]


@bench.command()
@with_engine_options
def load(
    folder: Annotated[Path, typer.Argument(help="Where the shards are written, and stay: empty, or not there.")],
    *,
    model_config: Annotated[str, typer.Option(help="The shape: llama-3-8b, llama-3-70b, or a folder.")] = "llama-3-70b",
    gib: Annotated[float, typer.Option(callback=above_zero, help="GiB of shards; the shape gets fewer layers.")] = 16.0,
    stored: Annotated[str, typer.Option(help="Their dtype: bfloat16, float16, float32 or float8_e4m3fn.")] = "bfloat16",
    repeats: Annotated[int, typer.Option(min=1, help="Times that they are read; a first one is discarded.")] = 3,
    cold: Annotated[bool, typer.Option("--cold", help="Have the system forget the files before each.")] = False,
    as_json: AsJson = False,
    save: Save = None,
    engine_options: dict[str, Any],
) -> None:
    """How fast sharded weights come from a folder into the device, and what that takes of the host's memory."""
    from refimpl.bench.load import run
    from refimpl.bench.result import report_result

    report_result(run(engine_options, model_config, folder, gib, stored, repeats, cold), as_json, save)


@bench.command()
@with_engine_options
def startup(
    *, model_config: ModelConfig = None, as_json: AsJson = False, save: Save = None, engine_options: dict[str, Any]
) -> None:
    """How long until the first token, by phase: in a new process with nothing compiled yet, and in the next one."""
    from refimpl.bench.result import report_result
    from refimpl.bench.startup import run

    report_result(run(engine_options, model_config), as_json, save)


@bench.command()
@with_engine_options
def idle(
    *,
    model_config: ModelConfig = None,
    sequences: Annotated[int, typer.Option(min=1, help="That decode together.")] = 256,
    steps: Annotated[int, typer.Option(min=1, help="That are profiled.")] = 200,
    timeline: Annotated[
        Path | None,
        typer.Option(callback=can_be_written, help="Write a few steps' kernels here as a Chrome trace (.json, .json.gz)."),
    ] = None,
    as_json: AsJson = False,
    save: Save = None,
    engine_options: dict[str, Any],
) -> None:
    """The share of the time in which the GPU idles while it decodes, by torch's profiler. Needs a GPU."""
    from refimpl.bench.idle import run
    from refimpl.bench.result import report_result

    report_result(run(engine_options, model_config, sequences, steps, timeline), as_json, save)


@bench.command("all-reduce")
def all_reduce(
    *,
    ranks: Annotated[int, typer.Option(min=1, help="Processes, on a GPU each if there are any.")] = 2,
    tokens: Annotated[str, typer.Option(help="Rows of a sum, by commas.")] = "1,8,64",
    hidden_size: Annotated[int, typer.Option(min=1, help="Numbers in a row.")] = 8192,
    count: Annotated[int, typer.Option(min=1, help="Sums back to back, as a step has them.")] = 160,
    as_json: AsJson = False,
    save: Save = None,
) -> None:
    """The sums between ranks of tensor parallelism, by every way that there is here: microseconds each."""
    from refimpl.bench.all_reduce import run
    from refimpl.bench.result import report_result

    try:
        rows = [int(number) for number in tokens.split(",")]
    except ValueError as error:
        raise ConfigError(f"tokens is {tokens!r}; give whole numbers by commas, such as 1,8,64") from error
    report_result(run(ranks, rows, hidden_size, count), as_json, save)


@bench.command()
@partial(with_engine_options, but=OF_SCALING)
def scaling(
    *,
    model_config: Annotated[str, typer.Option(help="The shape: llama-3-8b, llama-3-70b, or a folder.")] = "llama-3-70b",
    ranks: Annotated[
        str, typer.Option(help="Numbers of GPUs, by commas; without any, of processes of the CPU.")
    ] = "1,2,4,8",
    quantizations: Annotated[str, typer.Option(help="Of the weights, by commas.")] = "none,fp8,awq",
    rows: Annotated[
        str | None,
        typer.Option(
            help="Workloads, by commas: decode-N, mixed-N and saturated-N (1,000 tokens in and out) requests. Default: "
            "decode-1,decode-16,decode-64,decode-192,mixed-128,mixed-512,saturated-512."
        ),
    ] = None,
    variants: Annotated[
        str,
        typer.Option(help="How, by commas. All but default are measured by some decodes, draft on the most ranks alone."),
    ] = "default,eager,one_shot,two_shot,draft",
    draft: Annotated[str, typer.Option(help="The shape of the draft model: a name, or a folder.")] = "llama-3-8b",
    repeats: Annotated[
        int, typer.Option(min=1, help="Times that a workload is answered; before, some of it with few tokens.")
    ] = 2,
    scale: Annotated[float, typer.Option(callback=above_zero, help="Shrink all lengths by this, for a quick look.")] = 1.0,
    same_tokens: Annotated[
        bool, typer.Option(help="First compare the greedy tokens of a small model over the ranks.")
    ] = True,
    max_minutes: MaxMinutes = None,
    as_json: AsJson = False,
    save: Save = None,
    engine_options: dict[str, Any],
) -> None:
    """A shape on several numbers of GPUs: efficiency, weights' read floor, sums, CUDA graphs, drafts, the simulator."""
    from refimpl.bench.result import report_result
    from refimpl.bench.scaling import Asked, run
    from refimpl.bench.scaling_plan import WORKLOADS

    try:
        numbers = [int(number) for number in ranks.split(",")]
    except ValueError as error:
        raise ConfigError(f"ranks is {ranks!r}; give whole numbers by commas, such as 1,2,4,8") from error
    workloads = rows.split(",") if rows else WORKLOADS
    asked = Asked(numbers, quantizations.split(","), workloads, variants.split(","), draft, repeats, scale, same_tokens)
    report_result(run(engine_options, model_config, asked, max_minutes), as_json, save)


@bench.command()
@with_engine_options
def gpu(
    *,
    model_config: Annotated[str, typer.Option(help="The shape: llama-3-8b, llama-3-70b, or a folder.")] = "llama-3-8b",
    as_json: AsJson = False,
    save: Save = None,
    engine_options: dict[str, Any],
) -> None:
    """All results of a GPU, one after the other: start-up, every kernel, throughput, arrivals by the clock, idle share."""
    from refimpl.bench import idle, offline, serve_sim, startup
    from refimpl.bench import kernels as every_kernel
    from refimpl.bench.result import report_result

    # A start-up is measured in processes of its own, so it comes first: then nothing else is on the card.
    measures: list[Callable[[], Result]] = [
        partial(startup.run, engine_options, model_config),
        partial(every_kernel.run, ()),
        partial(offline.run, engine_options, model_config),
        partial(serve_sim.run, engine_options, None, model_config),
        partial(idle.run, engine_options, model_config, timeline=save and save / "idle-timeline.json.gz"),
    ]
    failed = False
    for measure in measures:
        try:
            report_result(measure(), as_json, save)
        except SystemExit:  # a check failed; the other results are wanted all the same
            failed = True
    if failed:
        sys.exit(1)
