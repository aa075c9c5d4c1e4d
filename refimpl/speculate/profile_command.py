"""``refimpl speculate profile``: what speculation brings here, and what to set. What needs torch is imported late."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from refimpl.cli_prompts import read_prompts
from refimpl.errors import ConfigError


def profile(
    *,
    prompts_file: Annotated[
        Path | None,
        typer.Option(help='JSON lines, as of `refimpl generate`; "-" is standard input. Default: built-in ones.'),
    ] = None,
    workload: Annotated[
        str, typer.Option(help="The built-in prompts: chat, or copy (repeat this, rename in this code).")
    ] = ("chat"),
    batch_sizes: Annotated[str, typer.Option(help="Sequences that run together, by commas, rising.")] = "1",
    max_tokens: Annotated[int, typer.Option(min=1, help="Output tokens of each prompt.")] = 64,
    temperature: Annotated[float, typer.Option(help="Of all requests.")] = 0.0,
    repeats: Annotated[
        int, typer.Option(min=1, help="Times that every number of drafts runs, in turn; one more goes before.")
    ] = 2,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as one JSON object.")] = False,
    engine_options: dict[str, Any],
) -> None:
    """Profile speculation: acceptance by position, costs, and the speed-up of each number of drafts, predicted and measured.

    Any drafter: --speculative-method ngram (the default), draft_model with --speculative-model, or head.
    """
    from refimpl.speculate.profile import run, tell

    try:
        sizes = [int(size) for size in batch_sizes.split(",")]
    except ValueError as error:
        raise ConfigError(f"batch_sizes is {batch_sizes!r}; give whole numbers by commas, such as 1,8,64") from error
    prompts = read_prompts(prompts_file) if prompts_file is not None else workload
    found = run(engine_options, prompts, sizes, max_tokens=max_tokens, temperature=temperature, repeats=repeats)
    if as_json:
        typer.echo(json.dumps(found))
    else:
        tell(found)
