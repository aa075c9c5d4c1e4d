"""The Grafana dashboard of a server, drawn without Grafana: the panels of its file, filled with Prometheus' answers.

What is asked, where a panel stands, its unit and its legend are the file's; colours are the project's. An axis begins at 0
and ends at the largest value.
"""

import html
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from refimpl.visualizers.palette import FONT, LIGHT, hue

COLUMN, ROW = 52, 24
"""Pixels of a unit of the grid, across and down."""
TOP, LEFT, BOTTOM, RIGHT = 28, 52, 40, 14
"""Pixels of a panel beside its plot: title, numbers of the axis, times and legend, air."""
UNITS = {"percentunit": (100.0, "%"), "Bps": (1e-6, "MB/s"), "reqps": (1.0, ""), "short": (1.0, "")}


@dataclass(frozen=True)
class Series:
    """One line: its labels, and values by seconds since the beginning; NaN where there is none."""

    labels: Mapping[str, str]
    points: list[tuple[float, float]]


Ask = Callable[[str], list[Series]]


def draw(dashboard: dict[str, Any], ask: Ask, seconds: float) -> str:
    """An SVG of all panels over so many seconds."""
    panels = dashboard["panels"]
    width = COLUMN * 24
    height = ROW * max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels)
    parts = [_placed(panel, _panel(panel, ask, seconds) if "targets" in panel else _row(panel)) for panel in panels]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family=\'{FONT}\' font-size="11">'
    )
    return f'{head}<rect width="100%" height="100%" fill="{LIGHT["faint"]}"/>{"".join(parts)}</svg>'


def _placed(panel: dict[str, Any], drawing: str) -> str:
    at = panel["gridPos"]
    return f'<g transform="translate({at["x"] * COLUMN},{at["y"] * ROW})">{drawing}</g>'


def _row(panel: dict[str, Any]) -> str:
    return _text(6, 17, panel["title"], size=13, weight="600")


def _panel(panel: dict[str, Any], ask: Ask, seconds: float) -> str:
    width, height = panel["gridPos"]["w"] * COLUMN, panel["gridPos"]["h"] * ROW
    lines = [
        (_legend(target["legendFormat"], one.labels), one) for target in panel["targets"] for one in ask(target["expr"])
    ]
    largest = max((value for _, one in lines for _, value in one.points if math.isfinite(value)), default=0.0) or 1.0
    scale, unit = _unit(panel["fieldConfig"]["defaults"]["unit"], largest)
    across, down = (width - LEFT - RIGHT) / seconds, (height - TOP - BOTTOM) / largest

    def place(at: float, value: float) -> tuple[float, float]:
        return LEFT + at * across, height - BOTTOM - value * down

    drawn = [f'<rect x="3" y="3" width="{width - 6}" height="{height - 6}" rx="2" fill="{LIGHT["bg"]}"/>']
    drawn.append(_text(10, 19, f"{panel['title']}{unit and f', {unit}'}", weight="600"))
    for share in (0.0, 0.5, 1.0):
        x, y = place(0.0, share * largest)
        drawn.append(f'<line x1="{x}" x2="{width - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="{LIGHT["rule"]}"/>')
        drawn.append(_text(x - 4, y + 4, f"{share * largest * scale:.3g}", anchor="end", size=9))
        x, y = place(share * seconds, 0.0)
        drawn.append(
            _text(x, y + 12, f"{share * seconds:.0f} s", anchor=("start", "middle", "end")[round(2 * share)], size=9)
        )
    x = 10.0
    for number, (name, one) in enumerate(lines):
        colour = hue(LIGHT, number % 8)
        drawn.append(f'<path d="{_path(one, place)}" fill="none" stroke="{colour}" stroke-width="1.3"/>')
        drawn.append(f'<rect x="{x:.0f}" y="{height - 18}" width="9" height="3" fill="{colour}"/>')
        drawn.append(_text(x + 12, height - 13, name, size=9))
        x += 20 + 5.0 * len(name)
    return "".join(drawn)


def _legend(form: str, labels: Mapping[str, str]) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda found: labels.get(found[1], ""), form)


def _unit(unit: str, largest: float) -> tuple[float, str]:
    """What values are multiplied by, and the unit that they then have."""
    if unit == "s":
        return (1.0, "s") if largest >= 1 else (1e3, "ms")
    return UNITS[unit]


def _path(series: Series, place: Callable[[float, float], tuple[float, float]]) -> str:
    """A line that is broken where there is no value."""
    steps, pen = [], "M"
    for at, value in series.points:
        if math.isfinite(value):
            x, y = place(at, value)
            steps.append(f"{pen}{x:.1f},{y:.1f}")
        pen = "L" if math.isfinite(value) else "M"
    return " ".join(steps)


def _text(x: float, y: float, text: str, anchor: str = "start", size: int = 11, weight: str = "400") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" font-weight="{weight}"'
    return f'<text {place} fill="{LIGHT["ink"]}">{html.escape(text)}</text>'
