"""``refimpl doctor``: the report, as a table for people and as JSON for programs."""

from __future__ import annotations

import itertools
import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from refimpl.config import EngineArgs
from refimpl.doctor.findings import Finding, as_json, passes
from refimpl.doctor.versions import check_versions, installed

if TYPE_CHECKING:
    from rich.console import Console

STYLES = {"ok": "green", "note": "cyan", "warning": "yellow", "error": "bold red"}


def doctor(
    model: Annotated[
        str, typer.Argument(metavar="[MODEL]", help="As --model of generate; nothing is downloaded.")
    ] = "smollm2",
    *,
    lab: Annotated[bool, typer.Option("--lab", help="Also run everything that a class needs; under a minute.")] = False,
    as_json_: Annotated[bool, typer.Option("--json", help="One JSON object on stdout, and nothing else.")] = False,
    device: Annotated[str, typer.Option(help="As of generate.")] = "auto",
    dtype: Annotated[str, typer.Option(help="As of generate.")] = "auto",
    quantization: Annotated[str | None, typer.Option(help="As of generate.")] = None,
    tensor_parallel_size: Annotated[int, typer.Option(help="As of generate.")] = 1,
) -> None:
    """What this machine has, what the engine would do on it and why, and what to do about what is missing.

    The exit code is 1 if something is an error, else 0.
    """
    from rich.console import Console

    size = tensor_parallel_size
    args = EngineArgs(model=model, device=device, dtype=dtype, quantization=quantization, tensor_parallel_size=size)
    findings = examine(args)
    if lab:
        from refimpl.doctor.lab_check import check_lab, for_a_lab

        findings = for_a_lab(findings)
        for finding in check_lab():
            findings.append(finding)
            if not as_json_:
                sys.stderr.write(f"{finding.status:8s}{finding.name}\n")  # these take seconds
    if as_json_:
        sys.stdout.write(json.dumps(as_json(findings, installed("refimpl") or ""), ensure_ascii=False) + "\n")
    else:
        show(findings, Console(highlight=False))
    if not passes(findings):
        raise typer.Exit(1)


def examine(args: EngineArgs) -> list[Finding]:
    """All but the lab's: nothing is run or downloaded. torch is imported unless it is missing."""
    findings = check_versions()
    if not passes(findings):
        return findings  # without torch and its like there is nothing more to be said
    from refimpl.doctor.machine import check_choices, check_machine
    from refimpl.doctor.models import check_model, check_models
    from refimpl.doctor.notebooks import check_notebooks

    choices, chosen_device, chosen_dtype = check_choices(args)
    findings += [*check_machine(), *choices, *check_models()]
    return [*findings, *check_model(args, chosen_device, chosen_dtype), *check_notebooks()]


def show(findings: list[Finding], console: Console) -> None:
    """A table an area, and a last line that says how it stands."""
    from rich.table import Table
    from rich.text import Text

    for area, group in itertools.groupby(findings, key=lambda finding: finding.area):
        table = Table(title=area, title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
        for column in (8, 22, None):
            table.add_column(width=column, overflow="fold")
        for finding in group:
            value = Text(finding.value)
            if finding.advice:
                value.append(f"\n{finding.advice}", style="dim" if finding.status == "ok" else STYLES[finding.status])
            table.add_row(Text(finding.status, style=STYLES[finding.status]), Text(finding.name), value)
        console.print(table)
        console.print()
    bad = [f for f in findings if f.status == "error"]
    unsure = sum(f.status == "warning" for f in findings)
    verdict = f"{len(bad)} error(s): {', '.join(f.name for f in bad)}" if bad else "no errors"
    console.print(Text(f"{verdict}; {unsure} warning(s)", style=STYLES["error" if bad else "warning" if unsure else "ok"]))
