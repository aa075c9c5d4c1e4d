"""The form of a benchmark's outcome, and where outcomes worth keeping go.

``{"topic", "setting", "results", "checks": [{"name", "value", "bound", "ok"}]}``: the setting says everything that the
figures depend on; a check is a figure that the README states, with the bound that it must keep. A row of the results that
was not measured has a ``not_measured`` that says why.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import platform
import re
import sys
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from refimpl.loading.checkpoint import Checkpoint


@dataclass(frozen=True)
class Check:
    """A figure and its bound, such as ``>= 100``."""

    name: str
    value: float
    bound: str
    ok: bool


def check(name: str, value: float, relation: Literal[">=", "<="], bound: float) -> Check:
    """Hold a figure against its bound."""
    return Check(name, value, f"{relation} {bound:g}", value >= bound if relation == ">=" else value <= bound)


@dataclass(frozen=True)
class Result:
    """What a benchmark found."""

    topic: str
    setting: dict[str, Any]
    results: dict[str, Any]
    checks: list[Check]

    def not_measured(self) -> list[str]:
        """Names of the rows that say why they have no figures."""
        return [name for name, row in self.results.items() if isinstance(row, dict) and "not_measured" in row]


def setting(checkpoint: Checkpoint | None = None, **more: Any) -> dict[str, Any]:
    """Hardware, versions and date, and which model that is; ``more`` adds workload and the like."""
    import torch

    model = {} if checkpoint is None else {"model": checkpoint.name, "model_hash": checkpoint.fingerprint()}
    return {
        "hardware": hardware(),
        "threads": torch.get_num_threads(),
        "versions": {name: version(name) for name in ("refimpl", "torch", "transformers")}
        | {"python": platform.python_version()},
        "date": datetime.date.today().isoformat(),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        **model,
        **more,
    }


def hardware() -> str:
    """The GPU's name, or the CPU's with the cores that this process may use."""
    import torch

    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()}x {torch.cuda.get_device_name()}"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    name = platform.processor() or platform.machine()
    try:
        match = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
        name = match[1].strip() if match else name
    except OSError:
        pass
    return f"{name}, {cores} cores, {torch.backends.cpu.get_cpu_capability()}"


def workload_hash(workload: Any) -> str:
    """A short hash of a workload's JSON."""
    return hashlib.blake2b(json.dumps(workload, sort_keys=True).encode(), digest_size=8).hexdigest()


def report_result(result: Result, as_json: bool, save: Path | None) -> None:
    """Print a result, for programs or for people, and keep it if asked.

    Results of other hardware and dtypes are kept beside it. Exit code 1 if a check fails, or a row was not measured; such a
    result never takes a whole one's place.
    """
    text = json.dumps(asdict(result), indent=None if as_json else 2)
    print(text)  # noqa: T201 - this is the command's output
    if save is not None:
        of = f"{result.setting['hardware']} {result.setting.get('dtype', '')}"  # a result of another dtype stays beside
        slug = re.sub(r"[^a-z0-9]+", "-", of.lower()).strip("-")
        partial = "-partial" if result.not_measured() else ""
        path = save / f"{result.topic}-{slug}-{result.setting['date']}{partial}.json"
        path.write_text(json.dumps(asdict(result), indent=2) + "\n")
        print(f"refimpl: kept as {path}", file=sys.stderr)  # noqa: T201
    if result.not_measured() or not all(check.ok for check in result.checks):
        sys.exit(1)
