"""``refimpl doctor --lab``: is this machine ready for a class? Everything is run once; what fails says what to do."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.resources import files
from pathlib import Path

from refimpl.config import EngineArgs
from refimpl.doctor.findings import Finding
from refimpl.errors import RefimplError
from refimpl.loading.pull import EMBEDDED_MODEL, embedded_folder_if_cached

PATIENCE = 60.0
"""Seconds that the whole check may take on a machine that is fit for a class."""
RESERVE = 10.0
"""Seconds of them that are left to end in, when a part that takes long is cut off."""
SLOW = 2.0
"""Tokens a second of the embedded model under which a class would wait for the machine."""
LAB_ERRORS = {"disk", "memory", "JupyterLab", "kernel", "widgets", "jupyterlab", "ipywidgets", "anywidget"}
"""Findings that are warnings for refimpl, and errors for a machine that a class works on."""


def for_a_lab(findings: list[Finding]) -> list[Finding]:
    """The general findings, as a lab machine is judged."""
    strict = [f.status == "warning" and f.name in LAB_ERRORS for f in findings]
    return [
        Finding(f.area, f.name, f.value, "error", f.advice) if is_error else f
        for f, is_error in zip(findings, strict, strict=True)
    ]


def check_lab(folder: Path | None = None) -> Iterator[Finding]:
    """Run the engine, the widgets and the embedded model; each finding comes when its part is done.

    ``folder`` is where the notebooks would be copied to (the current one by default).
    """
    start = time.monotonic()
    with _ImportingLab() as importing:  # it takes longest, so it goes on beside the others
        yield _tried(
            "the engine (tiny)", _run_tiny, "reinstall refimpl; if it stays, report this with refimpl doctor --json"
        )
        yield _tried("widgets", _make_widgets, 'pip install "refimpl[notebooks]"')
        yield _tried("notebooks", lambda: _notebooks(folder or Path.cwd()), "start in a folder that can be written to")
        if embedded_folder_if_cached() is None:
            advice = "refimpl pull, before the class (93 MB); the notebooks' cells on real text need it"
            yield Finding("lab", f"the engine ({EMBEDDED_MODEL})", "the model is not here", "warning", advice)
        else:
            advice = "remove its folder (see models) and refimpl pull"
            yield _tried(f"the engine ({EMBEDDED_MODEL})", lambda: _run_embedded(start + PATIENCE - RESERVE), advice)
        until = max(start + PATIENCE, time.monotonic() + RESERVE)
        yield _tried("JupyterLab", lambda: importing.versions(until), 'pip install "refimpl[notebooks]"')
    seconds = time.monotonic() - start
    late = (
        f"a class would wait too: more than {PATIENCE:.0f} s. The parts above tell their seconds; see what else runs (top), "
        "and whether Python's packages and refimpl's cache lie on a slow or a network disk"
    )
    is_late = seconds > PATIENCE
    yield Finding("lab", "all of it", f"{seconds:.0f} s", "warning" if is_late else "ok", late if is_late else "")


def _tried(name: str, run: Callable[[], tuple[str, str]], advice: str) -> Finding:
    """Run one part: it says what it found, and a warning if it is not as it should be; what it raises is an error."""
    start = time.monotonic()
    try:
        value, warning = run()
    except Exception as error:  # whatever is wrong with this machine: it is what this command is for
        reason = (str(error).strip().splitlines() or ["no reason given"])[0]
        return Finding("lab", name, f"failed: {type(error).__name__}: {reason}", "error", advice)
    value = f"{value} ({time.monotonic() - start:.1f} s)"
    return Finding("lab", name, value, "warning" if warning else "ok", warning)


def _run_tiny() -> tuple[str, str]:
    from refimpl.llm import LLM
    from refimpl.sampling_params import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM("tiny", dtype="float64", num_gpu_blocks_override=32) as llm:
        first, second = (llm.generate(["Hello", "Hello, again"], params, use_tqdm=False) for _ in range(2))
        if [o.outputs[0].token_ids for o in first] != [o.outputs[0].token_ids for o in second]:
            raise RefimplError("the same prompts gave other tokens the second time")
        if problems := llm.engine.audit():
            raise RefimplError(f"the cache's books are wrong: {problems[0]}")
    return "tokens drawn, repeated from cached blocks, books audited", ""


def _make_widgets() -> tuple[str, str]:
    from refimpl.llm import LLM
    from refimpl.sampling_params import SamplingParams

    import_module("anywidget")
    with LLM("tiny", num_gpu_blocks_override=8) as llm:
        from refimpl.visualizers import BlockMap

        widget = BlockMap(llm)
        llm.generate("Hello", SamplingParams(max_tokens=4), use_tqdm=False)
        widget.close()
    return "a block map, fed by the engine", ""


IMPORT_LAB = """
from importlib import import_module
print(", ".join(f"{name} {import_module(name).__version__}" for name in ("jupyterlab", "ipywidgets", "ipykernel")))
"""


class _ImportingLab:
    """JupyterLab being imported in a process of its own."""

    def __enter__(self) -> _ImportingLab:
        command = [sys.executable, "-c", IMPORT_LAB]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def versions(self, until: float) -> tuple[str, str]:
        """What was imported, if it is done by then (``time.monotonic``)."""
        try:
            out, err = self._process.communicate(timeout=max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            return "is still being imported", "it would take as long to start in the class: see what else this machine does"
        if self._process.returncode:
            raise RefimplError((err.strip().splitlines() or ["its import failed without a word"])[-1])
        return out.strip(), ""


def _notebooks(folder: Path) -> tuple[str, str]:
    names = [file.name for file in files("refimpl").joinpath("notebooks").iterdir() if file.name.endswith(".ipynb")]
    if not names:
        raise RefimplError("this installation has no notebooks")
    if not os.access(folder, os.W_OK):
        raise RefimplError(f"refimpl lab cannot write to {folder}")
    return f"{len(names)} to copy; {folder} can be written to", ""


QUESTION = "The capital of France is"
"""Whose answer no rounding changes: it is twelve times as probable as the next, while a chat's first word is not."""


def _run_embedded(until: float) -> tuple[str, str]:
    """Ask a question; an answer that is not there in time (``time.monotonic``) is not waited for."""
    from refimpl.engine import Engine
    from refimpl.sampling_params import SamplingParams

    slow = "slow for a class: close other programs, or set OMP_NUM_THREADS to the cores that are free"
    engine = Engine(EngineArgs(model=EMBEDDED_MODEL, max_model_len=256, max_num_seqs=4))
    try:
        engine.add_request("lab", QUESTION, SamplingParams(temperature=0, max_tokens=12))
        text, times, ended = "", [0.0], False
        while not ended and time.monotonic() < until:
            for output in engine.step():
                text, times, ended = output.outputs[0].text, output.metrics.token_times[0], output.finished
    finally:
        engine.close()
    if ended and "Paris" not in text:
        raise RefimplError(f"asked for the capital of France, it says {text!r}")
    if not ended:
        return f"has not answered in time; so far {text!r}", slow
    rate = (len(times) - 1) / (times[-1] - times[0])
    return f"answers, {rate:.1f} tokens a second", slow if rate < SLOW else ""
