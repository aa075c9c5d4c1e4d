"""Execute the notebooks anew, and keep them in the form in which they are committed.

    python tests/notebooks/run_notebooks.py [NAME …]     # such as 01_kv_cache; without a name, all of them

Each runs in an empty folder, with a kernel of this Python. What is kept is the code, its outputs and the cells' ids and
tags: no times of execution, no widget state, nothing that names a machine. Of a widget its picture is kept.
"""
# ruff: noqa: T201, a command prints

import base64
import re
import sys
import tempfile
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[2] / "notebooks"
SECONDS_A_CELL = 600
KEPT_OF_A_CELL = ("tags", "jupyter", "cellView")
LIVE = "application/vnd.jupyter.widget-view+json"
DRAWING = re.compile(r"<svg\b.*?</svg>", re.DOTALL)
IN_A_BROWSER = ("00_quickstart", "03_paged_attention", "04_continuous_batching")
"""Run and clicked in a real JupyterLab, where there is a browser (tests/visualizers/test_notebooks_in_browser.py)."""


def execute(path, folder):
    """A notebook with fresh outputs; its cells run in ``folder``.

    Raises:
        CellExecutionError: a cell raised.

    """
    notebook = normal(nbformat.read(path, as_version=4))
    client = NotebookClient(
        notebook, timeout=SECONDS_A_CELL, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    )
    return client.execute()


def assert_checks_say_right(ran):
    """Every cell that checks an exercise has found the solution right."""
    cells = [cell for cell in ran.cells if cell.cell_type == "code"]
    said = "".join(text for cell in cells for text in texts(cell))
    assert said.count(": right") == sum("check" in cell.metadata.get("tags", []) for cell in cells)


def texts(cell):
    """Everything that a cell's outputs show, as text."""
    for output in cell.outputs:
        yield output.get("text", "")
        for value in output.get("data", {}).values():
            yield str(value)


def normal(notebook):
    """The form in which a notebook is committed: the same cells and outputs make the same file."""
    notebook = nbformat.from_dict(notebook)
    notebook.metadata = nbformat.from_dict(
        {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        }
    )
    for cell in notebook.cells:
        cell.metadata = nbformat.from_dict({name: cell.metadata[name] for name in KEPT_OF_A_CELL if name in cell.metadata})
        for output in cell.get("outputs", []):
            if "metadata" in output:
                output.metadata = nbformat.from_dict({})
            if "data" in output:
                output.data = nbformat.from_dict(picture(output.data))
    nbformat.validate(notebook)
    return notebook


def picture(data):
    """An output's forms, without the reference to a widget that is gone with its kernel.

    Drawings within HTML become images: GitHub, and JupyterLab before a notebook is trusted, take ``<svg>`` out of HTML.
    """
    kept = {kind: value for kind, value in data.items() if kind != LIVE}
    if "text/html" in kept:
        kept["text/html"] = DRAWING.sub(image, kept["text/html"])
    return kept


def image(drawing):
    encoded = base64.b64encode(drawing[0].encode()).decode()
    return f'<img style="max-width:100%" alt="" src="data:image/svg+xml;base64,{encoded}">'


def main(names):
    for path in sorted(FOLDER.glob("*.ipynb")):
        if names and path.stem not in names:
            continue
        started = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            notebook = normal(execute(path, folder))
        nbformat.write(notebook, path)
        print(f"{path.stem}: {time.perf_counter() - started:.0f} s, {path.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main(sys.argv[1:])
