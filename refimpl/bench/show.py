"""Tables and charts of figures, for notebooks: what is shown is what was computed, wherever it is read.

A chart is lines and dots over two axes. It carries two forms of itself: plotly's JSON, which JupyterLab and VS Code draw
where plotly is installed, and an SVG, which everything else shows, GitHub and exported pages among them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

Points = Sequence[tuple[float, float]]

WIDTH, HEIGHT = 860, 400
LEFT, RIGHT, TOP, BOTTOM = 76, 230, 40, 52
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Okabe and Ito's: told apart by readers who see colours differently."""
MANY = 60
"""A line of more points than this is drawn without marks."""


_FIGURE = re.compile(r"[-−+±≤≥<>~]?\s?\d|–?$")
"""A cell that begins as a figure does, or is empty."""


@dataclass(frozen=True, repr=False)
class Table:
    """Rows under a head. Notebooks show it as Markdown; ``str`` is the same text."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def __str__(self) -> str:
        columns = list(zip(*self.rows, strict=True)) or [()] * len(self.head)
        rule = ["---", *("---:" if all(map(_FIGURE.match, cells)) else "---" for cells in columns[1:])]
        lines = [self.head, rule, *self.rows]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines)

    def __repr__(self) -> str:
        return str(self)

    def _repr_markdown_(self) -> str:
        return str(self)


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """A table; cells are shown as ``str`` makes them. Columns of figures are flush right, but the first."""
    made = tuple(tuple(str(cell).replace("|", "\\|") for cell in row) for row in rows)
    for row in made:
        if len(row) != len(head):
            raise ValueError(f"a row has {len(row)} cells under a head of {len(head)}: {row}")
    return Table(tuple(head), made)


@dataclass(frozen=True)
class Chart:
    """Lines and dots over two axes; see :func:`chart`."""

    title: str
    lines: Mapping[str, Points]
    x: str
    y: str
    log_x: bool = False
    log_y: bool = False
    dots: Collection[str] = ()

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        return {
            "application/vnd.plotly.v1+json": self.plotly(),
            "image/svg+xml": self.svg(),
            "text/plain": f"{self.title}: {self.y} by {self.x}; {', '.join(self.lines)}",
        }

    def plotly(self) -> dict[str, Any]:
        """The figure in plotly's JSON."""
        traces = [
            {
                "type": "scatter",
                "name": name,
                "x": [x for x, _ in points],
                "y": [y for _, y in points],
                "mode": "markers" if name in self.dots else "lines" if len(points) > MANY else "lines+markers",
                "line": {"color": colour},
                "marker": {"color": colour, "size": 11 if name in self.dots else 6},
            }
            for (name, points), colour in self._coloured()
        ]
        axes: dict[str, Any] = {}
        for axis, title, scale in zip("xy", (self.x, self.y), self._scales(), strict=True):
            axes[f"{axis}axis"] = {"title": {"text": title}, "type": "log" if scale.log else "linear"}
            if scale.log:  # plotly's own ticks are digits there
                axes[f"{axis}axis"] |= {"tickvals": scale.ticks(), "ticktext": [short(value) for value in scale.ticks()]}
        legend = {"orientation": "h", "x": 0, "y": -0.25}
        return {"data": traces, "layout": axes | {"height": HEIGHT, "title": {"text": self.title}, "legend": legend}}

    def _scales(self) -> tuple[_Scale, _Scale]:
        """The horizontal and the vertical one."""
        xs = [x for points in self.lines.values() for x, _ in points]
        ys = [y for points in self.lines.values() for _, y in points]
        return _Scale(xs, self.log_x, LEFT, WIDTH - RIGHT), _Scale(ys, self.log_y, HEIGHT - BOTTOM, TOP)

    def _coloured(self) -> list[tuple[tuple[str, Points], str]]:
        return [(line, COLOURS[i % len(COLOURS)]) for i, line in enumerate(self.lines.items())]

    def svg(self) -> str:
        """The figure as a drawing of its own."""
        xs, ys = self._scales()
        middle = (TOP + HEIGHT - BOTTOM) / 2
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" '
            f'role="img" font-family="sans-serif" font-size="12" fill="#222"><title>{escape(self.title)}</title>',
            f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
            f'<text x="{LEFT}" y="20" font-size="15">{escape(self.title)}</text>',
            f'<text x="{(LEFT + WIDTH - RIGHT) / 2:.0f}" y="{HEIGHT - 10}" text-anchor="middle">{escape(self.x)}</text>',
            f'<text x="16" y="{middle:.0f}" text-anchor="middle" transform="rotate(-90 16 {middle:.0f})">'
            f"{escape(self.y)}</text>",
        ]
        bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
        for value in xs.ticks():
            x = f"{xs.at(value):.1f}"
            parts.append(f'<path d="M{x} {TOP}V{bottom}" stroke="#ddd"/>')
            parts.append(f'<text x="{x}" y="{bottom + 17}" text-anchor="middle">{short(value)}</text>')
        for value in ys.ticks():
            parts.append(f'<path d="M{LEFT} {ys.at(value):.1f}H{right}" stroke="#ddd"/>')
            parts.append(f'<text x="{LEFT - 6}" y="{ys.at(value) + 4:.1f}" text-anchor="end">{short(value)}</text>')
        for number, ((name, points), colour) in enumerate(self._coloured()):
            parts += _drawn(name, [(xs.at(x), ys.at(y)) for x, y in points], colour, name in self.dots)
            parts += _legend(name, colour, number)
        return "".join(parts) + "</svg>"


def chart(
    title: str,
    lines: Mapping[str, Points],
    *,
    x: str,
    y: str,
    log_x: bool = False,
    log_y: bool = False,
    dots: Collection[str] = (),
) -> Chart:
    """A chart of named series of (x, y).

    Args:
        title: what it shows.
        lines: the points of each series.
        x: what is on the horizontal axis, with its unit.
        y: what is on the vertical axis, with its unit.
        log_x: a logarithmic horizontal axis; everything on it is above 0.
        log_y: the same for the vertical axis.
        dots: names of series that are dots without a line.

    """
    return Chart(title, {name: list(points) for name, points in lines.items()}, x, y, log_x, log_y, dots)


class _Scale:
    """From values to places on an axis of ``start`` to ``end`` pixels. A linear axis holds 0."""

    def __init__(self, values: Sequence[float], log: bool, start: float, end: float) -> None:
        self.log, self._start, self._end = log, start, end
        low, high = (min(values), max(values)) if log else (min(0.0, *values), max(0.0, *values))
        room = (high / low) ** 0.05 if log and high > low else 1.1
        self._low, self._high = (low / room, high * room) if log else (low, (high or 1) * 1.05)

    def at(self, value: float) -> float:
        """The pixel of a value."""
        low, high, value = (map(math.log, (self._low, self._high, value))) if self.log else (self._low, self._high, value)
        return self._start + (value - low) / (high - low) * (self._end - self._start)

    def ticks(self) -> list[float]:
        """Round values that lie on the axis, about eight at most."""
        if not self.log:
            step = 10 ** math.floor(math.log10((self._high - self._low) / 4))
            step = next(step * m for m in (1, 2, 5, 10) if (self._high - self._low) / (step * m) <= 8)
            return [step * i for i in range(math.ceil(self._low / step), math.floor(self._high / step) + 1)]
        powers = range(math.floor(math.log10(self._low)), math.ceil(math.log10(self._high)) + 1)
        within = [m * 10.0**p for p in powers for m in (1, 2, 5) if self._low <= m * 10.0**p <= self._high]
        tens = [value for value in within if math.log10(value) % 1 == 0]
        return within if len(within) <= 9 else tens[:: -(-len(tens) // 9)]


def short(value: float) -> str:
    """A number of an axis, shortened: 2.5G, 40k, 0.1."""
    for limit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / (1e3 if letter == 'k' else limit):g}{letter}"
    return f"{value:g}"


def _drawn(name: str, places: list[tuple[float, float]], colour: str, dots: bool) -> list[str]:
    """A series: a line with or without marks, or dots."""
    marks = dots or len(places) <= MANY
    radius = 5 if dots else 3
    circles = [
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{colour}"><title>{escape(name)}</title></circle>'
        for x, y in places
        if marks
    ]
    if dots:
        return circles
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    return [f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>', *circles]


def _legend(name: str, colour: str, number: int) -> list[str]:
    """A series' name, to the right of the plot."""
    x, y = WIDTH - RIGHT + 12, TOP + 12 + 18 * number
    return [
        f'<rect x="{x}" y="{y - 9}" width="10" height="10" fill="{colour}"/>',
        f'<text x="{x + 15}" y="{y}">{escape(name)}</text>',
    ]
