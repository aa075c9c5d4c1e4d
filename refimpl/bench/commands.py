"""The commands of ``refimpl bench``. As with all commands, what needs torch is imported when it runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from refimpl.bench import gpu_commands as gpu_commands  # adds commands of its own
from refimpl.bench import quantization_command as quantization_command
from refimpl.bench import serve_command as serve_command
from refimpl.bench import speculation_command as speculation_command
from refimpl.bench.app import AsJson, MaxMinutes, ModelConfig, Save
from refimpl.bench.app import bench as bench
from refimpl.cli_checks import above_zero, can_be_written
from refimpl.cli_options import with_engine_options
from refimpl.errors import ConfigError


@bench.command()
@with_engine_options
def recompute(
    *,
    context: Annotated[int, typer.Option(min=1, help="Measure the steps after this many tokens of context.")] = 504,
    steps: Annotated[int, typer.Option(min=1, help="How many steps to measure.")] = 8,
    repeats: Annotated[int, typer.Option(min=1, help="Times that both sides run, in turn.")] = 5,
    as_json: AsJson = False,
    save: Save = None,
    engine_options: dict[str, Any],
) -> None:
    """A decode step with the KV cache beside one that recomputes everything: FLOPs counted, time measured."""
    from refimpl.bench.recompute import run
    from refimpl.bench.result import report_result

    report_result(run(engine_options, context=context, steps=steps, repeats=repeats), as_json, save)


@bench.command()
@with_engine_options
def sharing(
    *,
    repeats: Annotated[int, typer.Option(min=1, help="Times that both sides of the prefix cache run, in turn.")] = 5,
    as_json: AsJson = False,
    save: Save = None,
    engine_options: dict[str, Any],
) -> None:
    """Blocks that samples of one prompt share, and the time to a first token behind a cached prefix."""
    from refimpl.bench.result import report_result
    from refimpl.bench.sharing import run

    report_result(run(engine_options, repeats=repeats), as_json, save)


@bench.command()
def scheduler(
    *,
    steps: Annotated[int, typer.Option(min=1, help="Steps that are counted.")] = 500,
    as_json: AsJson = False,
    save: Save = None,
) -> None:
    """What planning a step costs for 256 sequences that decode, without a model."""
    from refimpl.bench.result import report_result
    from refimpl.bench.scheduler import run

    report_result(run(steps=steps), as_json, save)


@bench.command()
def memory(
    *,
    trace: Annotated[Path | None, typer.Option(help="A trace: CSV with TIMESTAMP, ContextTokens, GeneratedTokens.")] = None,
    lengths: Annotated[str, typer.Option(help="Without a trace: whose lengths to generate, conv or code.")] = "conv",
    requests: Annotated[int, typer.Option(min=1, help="How many to generate.")] = 19_366,
    seed: Annotated[int, typer.Option(help="Of the generator.")] = 0,
    as_json: AsJson = False,
    save: Save = None,
) -> None:
    """A paged cache beside a contiguous one for the requests of a trace: waste, and how many run at once. No model."""
    from refimpl.bench.memory import run
    from refimpl.bench.result import report_result

    report_result(run(trace=trace, name=lengths, count=requests, seed=seed), as_json, save)


@bench.command()
@with_engine_options
def batching(
    *,
    scale: Annotated[int, typer.Option(min=1, help="Divide all lengths (50 and 2,000 output tokens) by this.")] = 10,
    requests: Annotated[int, typer.Option(min=1, help="How many requests.")] = 240,
    share: Annotated[float, typer.Option(min=0, max=1, help="The share of short answers.")] = 2 / 3,
    as_json: AsJson = False,
    save: Save = None,
    engine_options: dict[str, Any],
) -> None:
    """Static batches beside continuous batching, for short and long answers mixed."""
    from refimpl.bench.batching import run
    from refimpl.bench.result import report_result

    report_result(run(engine_options, scale=scale, requests=requests, share=share), as_json, save)


Repeats = Annotated[int, typer.Option(min=1, help="Times that every side runs, in turn; a first turn is discarded.")]
Dtypes = Annotated[str, typer.Option(help="Dtypes to measure, by commas. --dtype counts for nothing here.")]
Compare = Annotated[str, typer.Option(help="transformers, in the setting that is fastest here, or none.")]
ComparePython = Annotated[
    Path | None, typer.Option(help="The Python of an environment with vLLM's CPU build, which is then compared as well.")
]


def _compares(compare: str) -> bool:
    if compare not in ("transformers", "none"):
        raise ConfigError(f"compare is {compare!r}; it must be transformers or none")
    return compare == "transformers"


@bench.command()
@with_engine_options
def throughput(
    *,
    model_config: Annotated[
        str | None,
        typer.Option(
            help="Instead of a model, a shape with random weights: llama-3-8b, llama-3-70b, or a folder with a config.json. "
            "It is measured alone, in --dtype: ids in and out, all requests at once."
        ),
    ] = None,
    rows: Annotated[
        str | None,
        typer.Option(
            help="Which, by commas: decode_b1, decode_b8, mixed_32; of a shape decode-N, mixed-N and saturated-N requests."
        ),
    ] = None,
    repeats: Repeats = 5,
    dtypes: Annotated[
        str | None, typer.Option(help="Of a model, by commas; default: bfloat16,float32. Its --dtype counts for nothing.")
    ] = None,
    compare: Annotated[
        str | None,
        typer.Option(help="Of a model: transformers, in the setting that is fastest here (the default), or none."),
    ] = None,
    compare_python: ComparePython = None,
    scale: Annotated[float, typer.Option(callback=above_zero, help="Shrink all lengths by this, for a quick look.")] = 1.0,
    max_minutes: MaxMinutes = None,
    as_json: AsJson = False,
    save: Save = None,
    engine_options: dict[str, Any],
) -> None:
    """Output tokens a second: beside other engines (one request, eight, 32 of mixed lengths), or of a shape alone."""
    from refimpl.bench import offline
    from refimpl.bench import throughput as compared
    from refimpl.bench.result import report_result

    names = rows.split(",") if rows else None
    if model_config is None:
        compares, which = _compares(compare or "transformers"), (dtypes or "bfloat16,float32").split(",")
        result = compared.run(engine_options, repeats, which, compares, compare_python, scale, names, max_minutes)
    elif dtypes or compare not in (None, "none") or compare_python:
        raise ConfigError(
            "a shape has random weights and is compared with nothing: leave out dtypes (its dtype counts), "
            "compare and compare_python, or model_config"
        )
    else:
        result = offline.run(engine_options, model_config, names or offline.WORKLOADS, repeats, scale, max_minutes)
    report_result(result, as_json, save)


@bench.command()
@with_engine_options
def latency(
    *,
    repeats: Repeats = 5,
    dtypes: Dtypes = "bfloat16,float32",
    compare: Compare = "transformers",
    compare_python: ComparePython = None,
    max_minutes: MaxMinutes = None,
    as_json: AsJson = False,
    save: Save = None,
    engine_options: dict[str, Any],
) -> None:
    """The time to the first token of a short and of a long prompt, beside other engines."""
    from refimpl.bench.latency import run
    from refimpl.bench.result import report_result

    compares, which = _compares(compare), dtypes.split(",")
    report_result(run(engine_options, repeats, which, compares, compare_python, max_minutes=max_minutes), as_json, save)


@bench.command()
@with_engine_options
def overhead(
    *,
    steps: Annotated[int, typer.Option(min=1, help="Steps that are counted.")] = 60,
    as_json: AsJson = False,
    save: Save = None,
    engine_options: dict[str, Any],
) -> None:
    """The share of a step outside the model, for 16 sequences, and what the host does for 256."""
    from refimpl.bench.overhead import run
    from refimpl.bench.result import report_result

    report_result(run(engine_options, steps=steps), as_json, save)


@bench.command()
@with_engine_options
def widgets(
    *,
    pairs: Annotated[int, typer.Option(min=1, help="Runs with a dashboard, and as many without, in turn.")] = 7,
    requests: Annotated[int, typer.Option(min=1, help="How many at once.")] = 16,
    tokens: Annotated[int, typer.Option(min=1, help="Of each request.")] = 128,
    frames: Annotated[int, typer.Option(min=1, help="Frames of the large pool.")] = 60,
    blocks: Annotated[int, typer.Option(min=1, help="Of the large pool.")] = 100_000,
    steps: Annotated[int, typer.Option(min=1, help="Of the log that is opened.")] = 10_000,
    as_json: AsJson = False,
    save: Save = None,
    engine_options: dict[str, Any],
) -> None:
    """Live widgets: what they cost the engine, what a frame of a large pool takes, and how soon a long log is open."""
    from refimpl.bench.result import report_result
    from refimpl.bench.widgets import run

    sizes = {"pairs": pairs, "requests": requests, "tokens": tokens, "frames": frames, "num_blocks": blocks, "steps": steps}
    report_result(run(engine_options, **sizes), as_json, save)


@bench.command()
def simulate(
    *,
    requests: Annotated[int, typer.Option(min=1, help="Conversations for paging and for each row of the table.")] = 1_500,
    seed: Annotated[int, typer.Option(help="Of lengths and arrivals.")] = 0,
    as_json: AsJson = False,
    save: Save = None,
) -> None:
    """The simulator beside measurements, and Llama-3-70B on 8 simulated A100s: batching, paging, the article's table."""
    from refimpl.bench.result import report_result
    from refimpl.bench.simulate import run

    report_result(run(requests=requests, seed=seed), as_json, save)


@bench.command()
@with_engine_options
def swap(
    *,
    lengths: Annotated[str, typer.Option(help="Tokens of the victims, rising, by commas.")] = "64,128,256,512,1024",
    others: Annotated[int, typer.Option(min=0, help="Requests that decode beside the longest victim.")] = 8,
    repeats: Annotated[int, typer.Option(min=1, help="Preemptions of each kind and length.")] = 5,
    model_config: ModelConfig = None,
    timeline: Annotated[
        Path | None,
        typer.Option(
            callback=can_be_written,
            help="Write the event log of the swaps beside others here (.jsonl, .jsonl.gz), for widgets.",
        ),
    ] = None,
    as_json: AsJson = False,
    save: Save = None,
    engine_options: dict[str, Any],
) -> None:
    """Preemption by swapping beside recomputing: seconds by length, where they cross, and what other requests feel."""
    from refimpl.bench.result import report_result
    from refimpl.bench.swap import run

    try:
        tokens = tuple(int(length) for length in lengths.split(","))
    except ValueError as error:
        raise ConfigError(f"lengths is {lengths!r}; give whole numbers by commas, such as 64,256,1024") from error
    report_result(run(engine_options, tokens, others, repeats, timeline, model_config), as_json, save)


@bench.command()
@with_engine_options
def beam(
    *,
    width: Annotated[int, typer.Option(min=1, help="Beams, and separate samples beside them.")] = 4,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 64,
    output: Annotated[int, typer.Option(min=1, help="Output tokens.")] = 256,
    repeats: Annotated[int, typer.Option(min=1, help="Prompts; each is searched, continued greedily, and sampled.")] = 3,
    as_json: AsJson = False,
    save: Save = None,
    engine_options: dict[str, Any],
) -> None:
    """Beams beside independent copies: blocks in use, blocks copied, and the time of a step."""
    from refimpl.bench.beam import run
    from refimpl.bench.result import report_result

    report_result(run(engine_options, width, prompt, output, repeats), as_json, save)


@bench.command()
def report(
    readme: Annotated[Path, typer.Option(help="The file whose tables are rendered.")] = Path("README.md"),
    claims: Annotated[Path, typer.Option(help="The claims page, which is written anew.")] = Path("notebooks/CLAIMS.md"),
) -> None:
    """Render the README's tables and the claims page from the result files that are kept in the package."""
    from refimpl.bench.claims_page import write_claims
    from refimpl.bench.report import render_file

    for path, changed in ((readme, render_file(readme)), (claims, write_claims(claims))):
        print(f"{path}: {'updated' if changed else 'nothing to change'}", file=sys.stderr)  # noqa: T201
