"""Checks of what commands are given, before anything is computed."""

from __future__ import annotations

import math
from pathlib import Path

import typer


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
