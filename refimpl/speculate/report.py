"""What a training tells: its report as JSON, as a table, and as a chart of loss and acceptance."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from refimpl.bench.show import Table, chart, table
from refimpl.speculate.acceptance import Acceptance

POINTS = 200
"""Of a line in the chart; each is the mean of some steps."""


class Trained(msgspec.Struct, frozen=True):
    """One step's figures: the loss, and the mean acceptance of each drafted token in its batch."""

    loss: float
    acceptance: list[float]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """A finished training."""

    kind: str
    target: str
    target_fingerprint: str
    command: str
    options: Any
    device: str
    num_parameters: int
    """That were trained."""
    chats: int
    answer_tokens: int
    """Of the training text."""
    coverage: float
    """The share of held-out tokens that the drafter can draft."""
    acceptance: list[Acceptance]
    """On held-out text, at each temperature."""
    seconds: dict[str, float]
    history: list[Trained]

    def acceptance_table(self) -> Table:
        """Acceptance by position on held-out text."""
        rows = []
        for found in self.acceptance:
            name = f"T = {found.temperature:g}" if found.temperature else "greedy"
            name += "" if found.prompts == "own" else f", {found.prompts}"
            for where, alphas in (("all tokens", found.by_position), ("outside loops", found.outside_loops)):
                rows.append([f"{name}, {where}", *(f"{alpha:.1%}" for alpha in alphas)])
            rows.append([f"{name}, share in loops", f"{found.share_of_loops:.1%}", *[""] * (len(found.by_position) - 1)])
        positions = len(self.acceptance[0].by_position)
        return table(["held-out text", *(f"token {i}" for i in range(1, positions + 1))], rows)


def write_report(report: Report, folder: Path) -> None:
    """Write ``report.json`` and ``training.svg``."""
    without_steps = {name: value for name, value in msgspec.to_builtins(report).items() if name != "history"}
    (folder / "report.json").write_bytes(msgspec.json.format(msgspec.json.encode(without_steps), indent=2) + b"\n")
    (folder / "training.svg").write_text(_chart(report.history).svg(), encoding="utf-8")


def _chart(history: list[Trained]) -> Any:
    piece = -(-len(history) // POINTS)
    lines: dict[str, list[tuple[float, float]]] = {"loss": []}
    for start in range(0, len(history), piece):
        steps = history[start : start + piece]
        lines["loss"].append((start + len(steps), sum(step.loss for step in steps) / len(steps)))
        for i in range(len(steps[0].acceptance)):
            mean = sum(step.acceptance[i] for step in steps) / len(steps)
            lines.setdefault(f"acceptance of token {i + 1}", []).append((start + len(steps), mean))
    return chart("A drafter in training", lines, x="steps", y="loss; share of drafted tokens accepted")
