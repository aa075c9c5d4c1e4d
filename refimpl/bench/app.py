"""The ``refimpl bench`` command and the options that several of its subcommands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from refimpl.cli_checks import above_zero

bench = typer.Typer(help="Measure, and print one JSON object of figures and checks.", no_args_is_help=True)

AsJson = Annotated[bool, typer.Option("--json", help="Print the JSON object alone.")]
Save = Annotated[
    Path | None,
    typer.Option(
        exists=True, file_okay=False, writable=True, help="Also write it as TOPIC-HARDWARE-DTYPE-DATE.json into this folder."
    ),
]
MaxMinutes = Annotated[
    float | None,
    typer.Option(
        callback=above_zero,
        help="For everything. Rows that take too long are made smaller, or left out; the result says so.",
    ),
]
ModelConfig = Annotated[
    str | None, typer.Option(help="With random weights: llama-3-8b, llama-3-70b, or a folder with a config.json.")
]
