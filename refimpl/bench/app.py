"""The ``refimpl bench`` command and the options that several of its subcommands have."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

bench = typer.Typer(help="Measure, and print one JSON object of figures and checks.", no_args_is_help=True)


def can_be_written(path: Path | None) -> Path | None:
    """See before anything is measured that a file can be written at its end.

    Raises:
        BadParameter: it is a folder, or its folder is not there.

    """
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        what = f"{path} is a folder" if path.is_dir() else f"there is no folder {path.parent}"
        raise typer.BadParameter(f"{what}; give the name of a file in a folder that is there")
    return path


def above_zero(number: float | None) -> float | None:
    """See that a length of time, a size or a factor is one.

    Raises:
        BadParameter: it is not above 0.

    """
    if number is not None and not 0 < number < math.inf:
        raise typer.BadParameter(f"{number:g} is not above 0")
    return number


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
