"""Finding: one thing that was looked at. A report is a list of them, for people and for programs."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

Status = Literal["ok", "note", "warning", "error"]


@dataclass(frozen=True)
class Finding:
    """What was found, whether it matters, and what to do."""

    area: str
    """versions, machine, choices, models, notebooks, or lab."""
    name: str
    value: str
    status: Status = "ok"
    """note: good to know; warning: something will not work, or slowly; error: refimpl, or this lab machine, cannot run."""
    advice: str = ""
    """What to do, or why it is so."""


def passes(findings: list[Finding]) -> bool:
    """Whether nothing is an error."""
    return all(finding.status != "error" for finding in findings)


def as_json(findings: list[Finding], version: str) -> dict[str, Any]:
    """The report for machines."""
    counts = {status: sum(f.status == status for f in findings) for status in ("warning", "error")}
    listed = [dataclasses.asdict(finding) for finding in findings]
    return {"refimpl": version, "ok": passes(findings), "counts": counts, "findings": listed}
