"""``refimpl bench serve``: a load generator for any server that speaks OpenAI's protocol."""

from __future__ import annotations

import json
import math
import os
import shlex
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from refimpl.bench.app import AsJson, MaxMinutes, Save, bench
from refimpl.bench.gpu_commands import limits_of
from refimpl.cli_checks import above_zero, can_be_written
from refimpl.cli_options import with_engine_options
from refimpl.errors import ConfigError

if TYPE_CHECKING:
    from refimpl.bench.open_loop import Outcome
    from refimpl.bench.result import Result
    from refimpl.bench.serve import Target

Measure = Callable[..., "Result"]
KEY = "OPENAI_API_KEY"
WorkloadName = Annotated[
    str,
    typer.Option(
        help="PROMPT/OUTPUT lengths (64-1024/16-512), chat, short-long, long-prompts, mixed, prefix:8*1024+64/64, conv, "
        "code, a trace (.csv), or prompts (.jsonl)."
    ),
]
Rate = Annotated[
    str, typer.Option(help="Requests a second, by commas (each is a row); inf: all at once; trace: as in the trace.")
]
Burstiness = Annotated[
    float, typer.Option(help="Shape of the gaps' gamma distribution: 1 is Poisson, less makes bursts, more is even.")
]


@bench.command()
@with_engine_options
def serve(
    *,
    url: Annotated[
        str | None, typer.Option(help="The server; without it, refimpl serve is started with the engine options below.")
    ] = None,
    served_model_name: Annotated[str | None, typer.Option(help="The model's name there; default: the first.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Use /chat/completions; else /completions.")] = False,
    workload: WorkloadName = "chat",
    request_rate: Rate = "inf",
    burstiness: Burstiness = 1.0,
    max_concurrency: Annotated[
        int | None, typer.Option(min=1, help="Keep requests back while so many are under way.")
    ] = None,
    num_prompts: Annotated[int, typer.Option(min=1, help="Requests of each row.")] = 200,
    warm_up: Annotated[int, typer.Option(min=0, help="Requests before each row that are not measured.")] = 4,
    goodput: Annotated[str, typer.Option(help="Limits in milliseconds that a good request keeps.")] = "ttft:200,tpot:50",
    seed: Annotated[int, typer.Option(help="Of lengths, prompts and times.")] = 0,
    vocab_size: Annotated[int, typer.Option(min=1, help="Random token ids are below it.")] = 1000,
    output_len: Annotated[int, typer.Option(min=1, help="Most output tokens for prompts of a file that do not say.")] = 128,
    ignore_eos: Annotated[
        bool, typer.Option(help="Ask for all output tokens; for servers that know no ignore_eos, switch it off.")
    ] = True,
    extra_body: Annotated[str | None, typer.Option(help="JSON: more fields of every request.")] = None,
    timeout: Annotated[
        float, typer.Option(callback=above_zero, help="Seconds without a byte until a request is given up.")
    ] = 600.0,
    server_args: Annotated[str, typer.Option(help="Without --url: more options of refimpl serve.")] = "",
    plot: Annotated[Path | None, typer.Option(callback=can_be_written, help="Write charts here, as an HTML page.")] = None,
    max_minutes: MaxMinutes = None,
    as_json: AsJson = False,
    save: Save = None,
    engine_options: dict[str, Any],
) -> None:
    """A server under load: requests by the clock over HTTP; first tokens, gaps, throughput, goodput, errors.

    A key is taken from the environment variable OPENAI_API_KEY. Every error is counted by its class, and the generator's own
    lateness stands beside the figures. The names of vLLM's `bench serve` mean the same here.
    """
    from refimpl.bench.result import report_result
    from refimpl.bench.serve import Pattern, Target, run
    from refimpl.bench.serve_plots import write_plots
    from refimpl.bench.serve_workload import Workload

    body = ({"ignore_eos": True} if ignore_eos else {}) | _body(extra_body)
    asked = Workload(workload, num_prompts, seed, burstiness, vocab_size, chat, output_len)
    pattern = Pattern(_rates(request_rate), max_concurrency, warm_up, limits_of(goodput))
    for rate in pattern.rates:
        asked.asks(rate)  # wrong options fail before a server is started
    target = Target(url or "", served_model_name, os.environ.get(KEY), timeout, body)
    outcomes: dict[str, Outcome] = {}
    measure = partial(run, workload=asked, pattern=pattern, max_minutes=max_minutes, outcomes=outcomes)
    result = (
        _there(target, measure, engine_options, server_args) if url else _here(target, measure, engine_options, server_args)
    )
    if plot is not None:
        write_plots(plot, outcomes)
    report_result(result, as_json, save)


def _there(target: Target, measure: Measure, engine_options: dict[str, Any], server_args: str) -> Result:
    """Measure a server that runs. Of the engine options its model's name alone means something."""
    from refimpl.bench.serve_process import flags_of

    named = flags_of({"model": engine_options["model"]})
    if flags := [*flags_of(engine_options | {"model": None}), *shlex.split(server_args)]:
        raise ConfigError(f"{' '.join(flags)} is for a server that is started here; with --url leave it out")
    return measure(replace(target, model=target.model or (named[1] if named else None)))


def _here(target: Target, measure: Measure, engine_options: dict[str, Any], server_args: str) -> Result:
    """Start a server, measure it, and end it."""
    from refimpl.bench.serve_process import flags_of, served
    from refimpl.loading.checkpoint import open_checkpoint

    fingerprint = open_checkpoint(engine_options["model"]).fingerprint()
    known = {"dtype": engine_options["dtype"], "model_hash": fingerprint, "server": f"refimpl serve {server_args}".strip()}
    with served([*flags_of(engine_options), *shlex.split(server_args)]) as url:
        return measure(replace(target, url=url), **known)


def _rates(text: str) -> tuple[float | None, ...]:
    try:
        rates = tuple(None if part == "trace" else float(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(f"request_rate is {text!r}; give numbers by commas, such as 10,20,30, or inf, or trace") from error
    if any(rate is not None and (math.isnan(rate) or rate <= 0) for rate in rates) or len(set(rates)) < len(rates):
        raise ConfigError(f"request_rate is {text!r}; rates are above 0, and each is given once")
    return rates


def _body(text: str | None) -> dict[str, Any]:
    try:
        body = json.loads(text or "{}")
    except ValueError as error:
        raise ConfigError(f"extra_body is no JSON ({error})") from error
    if not isinstance(body, dict):
        raise ConfigError(f"extra_body is {text!r}; it must be a JSON object")
    return body
