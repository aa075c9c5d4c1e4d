"""``refimpl lab``: the notebooks, copied into a folder of one's own, and JupyterLab opened there."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

from refimpl.errors import RefimplError

ENDINGS = (".ipynb", ".md", ".toml")


@dataclass
class Copied:
    """What became of each file, by name."""

    written: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    """Files that were there and differ from ours."""
    same: list[str] = field(default_factory=list)


def copy_notebooks(folder: Path, force: bool = False) -> Copied:
    """Copy the course into a folder, which is made if it is missing. A file that differs is kept, unless ``force``.

    Raises:
        RefimplError: the folder or a file in it cannot be read or written.

    """
    copied = Copied()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for source in sorted(files("refimpl").joinpath("notebooks").iterdir(), key=lambda file: file.name):
            if not source.name.endswith(ENDINGS):
                continue
            target, ours = folder / source.name, source.read_bytes()
            theirs = target.read_bytes() if target.exists() else None
            if theirs == ours:
                copied.same.append(source.name)
            elif theirs is not None and not force:
                copied.kept.append(source.name)
            else:
                target.write_bytes(ours)
                copied.written.append(source.name)
    except OSError as error:
        raise RefimplError(f"the notebooks cannot be copied into {folder}: {error}; name a folder to write to") from error
    return copied


def open_lab(folder: Path, browser: bool = True, port: int | None = None) -> int:
    """Run JupyterLab in a folder until it is stopped; returns its exit code.

    Raises:
        RefimplError: JupyterLab is not installed.

    """
    if find_spec("jupyterlab") is None:
        raise RefimplError(
            f'JupyterLab is not installed; pip install "refimpl[notebooks]", or open the notebooks in {folder} with '
            "another program"
        )
    command = [sys.executable, "-m", "jupyterlab", str(folder)]
    command += [] if browser else ["--no-browser"]
    command += [] if port is None else [f"--port={port}"]
    with subprocess.Popen(command) as process:
        while True:
            try:
                return process.wait()
            except KeyboardInterrupt:  # JupyterLab gets it too, asks, and ends itself
                continue
