"""``refimpl simulate``: the real scheduler and cache on hardware that is not there. It imports no torch."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from refimpl.bench.traces import generate, read_trace
from refimpl.config import EngineArgs
from refimpl.errors import ConfigError, RefimplError
from refimpl.events import EventLog, StepRecord
from refimpl.simulate import HARDWARE, MODELS, Deployment, Simulation, TraceRequest, arrive, mixed
from refimpl.simulate.models import FORMATS, KV_BYTES
from refimpl.simulate.workload import ARRIVALS, NAMED

NOT_SIMULATED = (
    "load_format", "device", "attention_backend", "cpu_kvcache_space", "event_log_size", "speculative_config",
)  # fmt: skip
"""Engine options that only a real device has, or that the simulator knows nothing of."""
FITTED = ("conv", "code")
REQUESTS = 1_000


def simulate(
    *,
    hardware: Annotated[str, typer.Option(help=f"One of {', '.join(HARDWARE)}.")] = "h200",
    tensor_parallel_size: Annotated[int, typer.Option(help="How many of them share the model.")] = 1,
    model: Annotated[
        str, typer.Option(help=f"{', '.join(MODELS)}, or a folder with a config.json (no weights are read).")
    ] = "llama-3-8b",
    dtype: Annotated[str, typer.Option(help=f"Of the weights: {', '.join(FORMATS)}.")] = "bfloat16",
    kv_cache_dtype: Annotated[str, typer.Option(help=f"Of the KV cache: {', '.join(KV_BYTES)} (auto: 16 bits).")] = "auto",
    workload: Annotated[
        str | None,
        typer.Option(
            help=f"{', '.join((*FITTED, *NAMED))}; or mixed:128-512/64-256, prompt and output tokens, each a number, range "
            "or choices with weights (50*2,2000*1); default: chat. conv and code are fitted to real traffic."
        ),
    ] = None,
    trace: Annotated[Path | None, typer.Option(help="CSV with TIMESTAMP, ContextTokens, GeneratedTokens, in order.")] = None,
    requests: Annotated[int | None, typer.Option(help=f"How many; default: {REQUESTS}, or the whole trace.")] = None,
    rate: Annotated[
        float | None,
        typer.Option(help="Requests a second; inf: all at once. Default: a trace's own times, for lengths all at once."),
    ] = None,
    arrivals: Annotated[str, typer.Option(help=f"With --rate: {' or '.join(ARRIVALS)}.")] = "poisson",
    enable_prefix_caching: Annotated[
        bool, typer.Option(help="Keep the prefix cache's books; these prompts have nothing in common.")
    ] = False,
    price: Annotated[
        float | None, typer.Option(help="US dollars for a device and hour; default: assumed, as the output says.")
    ] = None,
    save_log: Annotated[
        Path | None, typer.Option(help="Write the event log here (.jsonl or .jsonl.gz), for widgets.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object of figures alone.")] = False,
    engine_options: dict[str, Any],
) -> None:
    """Serve a workload on simulated hardware: throughput, latencies, memory, preemptions, cost.

    Scheduler, policies and cache are the engine's own; the time of a step is a roofline (see refimpl/simulate/roofline.py,
    which also says how far off it is). The seed (--seed) fixes everything.
    """
    from tqdm import tqdm

    args = EngineArgs.from_options(engine_options | {"enable_prefix_caching": enable_prefix_caching, "event_log_size": 0})
    if price is not None and not 0 <= price < math.inf:
        raise ConfigError(f"the price is {price:g}; it must be a number of US dollars an hour, 0 or more")
    coming, source = _requests(workload, trace, requests, rate, arrivals, args.seed)
    deployment = Deployment.of(model, hardware, tensor_parallel_size, args.quantization or dtype, kv_cache_dtype)
    simulation = Simulation(args, deployment, coming, price)
    show_bar = not as_json and sys.stderr.isatty()
    bar = tqdm(total=len(coming), desc="simulating", unit="request", leave=False, disable=not show_bar)
    with bar, _saving(simulation.events, save_log):
        figures = simulation.run(bar.update)
    setting = _setting(simulation, source, price is not None)
    if as_json:
        print(json.dumps(figures | {"setting": setting}))  # noqa: T201
    else:
        _print_table(figures, setting)


def _requests(
    workload: str | None, trace: Path | None, count: int | None, rate: float | None, arrivals: str, seed: int
) -> tuple[list[TraceRequest], str]:
    """The requests, and where they come from."""
    if count is not None and count < 1:
        raise ConfigError(f"{count} requests were asked for; give 1 or more")
    if trace is not None:
        if workload is not None:
            raise ConfigError("a trace and a workload are both given; give one of them")
        rows = read_trace(trace)
        if count is not None and count > len(rows):
            print(f"refimpl: {trace} has {len(rows)} requests, fewer than {count}: all are served", file=sys.stderr)  # noqa: T201
        listed, source = rows[:count], trace.name
    else:
        name = workload or "chat"
        lengths = name.removeprefix("mixed:").removeprefix("fixed:")
        listed = generate(name, count or REQUESTS, seed) if name in FITTED else mixed(lengths, count or REQUESTS, seed)
        source = name
    return arrive(listed, rate, seed, arrivals), source if rate is None else f"{source}, {arrivals} at {rate:g} a second"


@contextmanager
def _saving(events: EventLog, path: Path | None) -> Iterator[None]:
    """Write the event log while it grows."""
    if path is None:
        yield
        return
    failures: list[OSError] = []
    try:
        with events.saving(path) as write:

            def keep(record: StepRecord) -> None:
                try:
                    write(record)
                except OSError as error:
                    failures.append(error)
                    raise

            stop = events.subscribe(keep)
            yield
            stop()
    except OSError as error:
        failures.append(error)
    if failures:
        raise RefimplError(f"{path} cannot be written: {failures[0]}")


def _setting(simulation: Simulation, source: str, price_given: bool) -> dict[str, Any]:
    deployment, args, config = simulation.deployment, simulation.args, simulation.config
    return {
        "model": deployment.model_name,
        "hardware": deployment.hardware.name,
        "tensor_parallel_size": deployment.tensor_parallel_size,
        "dtype": deployment.weights.name,
        "kv_cache_bytes_per_value": deployment.kv_bytes,
        "workload": source,
        "seed": args.seed,
        "scheduler": args.scheduler,
        "kv_cache_manager": args.kv_cache_manager,
        "preemption_mode": args.preemption_mode,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "max_model_len": config.max_model_len,
        "memory": deployment.arithmetic(args.cache_config()),
        "price_source": "given" if price_given else f"assumed: {deployment.hardware.price_source}",
    }


def _print_table(figures: dict[str, Any], setting: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    devices = f"{setting['tensor_parallel_size']} × {setting['hardware']}"
    table = Table(title=f"{setting['model']} in {setting['dtype']} on {devices}, simulated", show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_column(style="dim")
    for row in _rows(figures, setting):
        table.add_row(*row)
    console.print(table)
    console.print(f"KV cache: {setting['memory']}", style="dim", soft_wrap=True)
    for refusal in figures["refusals"]:
        console.print(f"refused: {refusal}", style="yellow", soft_wrap=True, markup=False)


def _rows(f: dict[str, Any], setting: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    def ms(name: str) -> str:
        levels = [f[f"{name}_p{level}"] for level in (50, 90, 99)]
        return "–" if None in levels else " / ".join(f"{1e3 * seconds:,.1f}" for seconds in levels) + " ms"

    refused = f", {f['refused']:,} refused" if f["refused"] else ""
    cut = f", {f['cut']:,} cut at max_model_len" if f["cut"] else ""
    yield "requests", f"{f['finished']:,}", f"{setting['workload']}{refused}{cut}"
    yield "time", f"{f['seconds']:,.2f} s", f"{f['steps']:,} steps; the devices compute {f['busy']:.0%} of it"
    yield "throughput", f"{f['throughput']:,.0f} tokens/s", f"output; {f['total_throughput']:,.0f} with prompts"
    yield "concurrency", f"{f['concurrency_mean']:,.1f}", f"sequences on average; at most {f['concurrency_peak']:,}"
    yield "time to first token", ms("ttft"), "p50 / p90 / p99"
    yield "between tokens", ms("itl"), "p50 / p90 / p99"
    yield "time per output token", ms("tpot"), "p50 / p90 / p99 of requests"
    yield "whole answer", ms("latency"), "p50 / p90 / p99"
    yield (
        "KV cache in use",
        f"{f['kv_use_mean']:.1%}",
        f"on average; at most {f['kv_use_peak']:.1%} of {f['num_blocks']:,} blocks",
    )
    kinds = ", ".join(f"{count:,} by {kind}" for kind, count in f["preemptions"].items())
    yield "preemptions", f"{sum(f['preemptions'].values()):,}", kinds
    if f["num_host_blocks"]:
        moved = f"{f['blocks_swapped_out']:,} blocks out, {f['blocks_swapped_in']:,} back, of {f['num_host_blocks']:,} there"
        yield "swapping", f"{f['swap_seconds']:,.3f} s", moved
    yield "bound by memory", f"{f['memory_bound']:.0%}", "of the time computed; the rest by arithmetic"
    cost = f["cost_per_million_tokens"]
    where = f"a million output tokens; {f['price_per_gpu_hour']:.2f} a device and hour ({setting['price_source']})"
    yield "cost", "–" if cost is None else f"${cost:,.2f}", where
