"""What the course needs besides the engine: JupyterLab, a kernel, widgets, and a browser."""

from __future__ import annotations

import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

from refimpl.doctor.findings import Finding

INSTALL = 'pip install "refimpl[notebooks]"'
EXTENSIONS = {"@jupyter-widgets/jupyterlab-manager": "jupyterlab_widgets", "anywidget": "anywidget"}
"""JupyterLab's halves of the widgets, by the folder that their package brings."""
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "firefox")


def check_notebooks(prefix: Path = Path(sys.prefix)) -> list[Finding]:
    """By what is installed, without starting anything."""
    findings = []
    for module, what in (("jupyterlab", "JupyterLab"), ("ipykernel", "kernel"), ("anywidget", "widgets")):
        there = find_spec(module) is not None
        findings.append(
            Finding(
                "notebooks", what, module if there else "missing", "ok" if there else "warning", "" if there else INSTALL
            )
        )
    for extension, package in EXTENSIONS.items():
        if find_spec(package) is not None and not (prefix / "share/jupyter/labextensions" / extension).exists():
            advice = f"JupyterLab would show no widgets: pip install --force-reinstall {package}"
            findings.append(Finding("notebooks", extension, f"not in {prefix}", "warning", advice))
    return [*findings, _browser()]


def _browser() -> Finding:
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        advice = "refimpl lab --no-browser prints the address, to be opened from another machine"
        return Finding("notebooks", "browser", f"none of {', '.join(BROWSERS)} on PATH", "note", advice)
    return Finding("notebooks", "browser", found)
