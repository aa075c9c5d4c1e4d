"""Pictures of a server under load: how its latencies are spread, and what came when; a page that needs no network."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from refimpl.bench.open_loop import Outcome
from refimpl.bench.show import Chart, Points, chart
from refimpl.errors import RefimplError

MOST_POINTS = 400
"""Of a line."""


def charts(outcomes: Mapping[str, Outcome]) -> list[Chart]:
    """Shares of requests by their time to the first token, shares of gaps, and requests under way over time."""
    answered = {name: [answer for answer in one.answers if answer.error is None] for name, one in outcomes.items()}
    ttft = {name: _shares(a.times.to_first_token or 0.0 for a in answers) for name, answers in answered.items() if answers}
    itl = {name: _shares(gap for a in answers for gap in a.gaps) for name, answers in answered.items()}
    itl = {name: points for name, points in itl.items() if points}
    made = []
    if ttft:
        made.append(chart("Time to the first token", ttft, x="milliseconds", y="share of the requests"))
    if itl:
        made.append(chart("Time between tokens", itl, x="milliseconds", y="share of the gaps"))
    under_way = {name: _under_way(one) for name, one in outcomes.items() if one.answers}
    if under_way:
        made.append(chart("Requests under way", under_way, x="seconds", y="requests"))
    return made


def _shares(seconds: Iterable[float]) -> Points:
    """(milliseconds, share of the values up to there)."""
    ordered = sorted(seconds)
    n = len(ordered)
    places = sorted({(n - 1) * i // (MOST_POINTS - 1) for i in range(MOST_POINTS)}) if n else []
    return [(1e3 * ordered[place], (place + 1) / n) for place in places]


def _under_way(outcome: Outcome) -> Points:
    start = min(answer.sent for answer in outcome.answers)
    changes = sorted([(a.sent - start, 1) for a in outcome.answers] + [(a.ended - start, -1) for a in outcome.answers])
    points, number = [], 0
    for at, change in changes:
        number += change
        points.append((at, float(number)))
    every = -(-len(points) // MOST_POINTS)
    return points[::every]


def write_plots(path: Path, outcomes: Mapping[str, Outcome]) -> None:
    """Write the charts as one HTML page.

    Raises:
        RefimplError: plotly is not installed, nothing was measured, or the file cannot be written.

    """
    try:
        from plotly.io import to_html  # type: ignore[import-untyped,unused-ignore]
    except ImportError as error:
        raise RefimplError("plots need plotly, which is not installed: pip install plotly") from error
    made = charts(outcomes)
    if not made:
        raise RefimplError("there is nothing to plot: no request was sent")
    parts = [to_html(one.plotly(), full_html=False, include_plotlyjs=number == 0) for number, one in enumerate(made)]
    head = '<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>refimpl bench serve</title>'
    page = f"{head}\n{''.join(parts)}</html>\n"
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise RefimplError(f"{path} cannot be written: {error}") from error
