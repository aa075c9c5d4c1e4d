"""LatencyView: how long to the first word, and how steady after it? Two distributions, each on a logarithmic axis.

Left, the time to the first token: from the moment at which a request was accepted to the record that brought the first token
of any of its samples. Right, the pauses between neighbouring tokens of a sequence. How the log tells both is said in
:mod:`refimpl.visualizers.latency_fold`.
"""

from __future__ import annotations

import math
from typing import Any

from refimpl.visualizers.figure import WHOLE, WIDTH, Caption, Look, Picture, count, document, plain, rect, text
from refimpl.visualizers.history import History
from refimpl.visualizers.latency_column import BARS_PER_DECADE, SHORTEST
from refimpl.visualizers.latency_fold import LatencyFold, Pause, RequestLatency
from refimpl.visualizers.palette import Palette, hue

MOST_DOTS = 2000
"""Requests that are drawn as dots; more are drawn as bars."""
MOST_REASONS = 200
"""Dots that carry the scheduler's reason for a hover."""
MOST_WAITING = 200
"""Requests without a token that are drawn, as rings."""
LEFT, RIGHT, TOP, BOTTOM, HEIGHT = 112, 24, 26, 160, 184
"""Of a panel, in pixels: the margins beside its axis, the band of its plot, and all of it."""


class LatencyView:
    """The figure; see :class:`refimpl.visualizers.figure.Figure`."""

    name = "latency_view"
    title = "LatencyView"
    question = "How long to the first word, and how steady after it?"

    folds = (LatencyFold,)

    def picture(self, history: History, position: int, look: Look = WHOLE) -> Picture:
        """Two distributions up to the record at ``position``; their axes hold the whole log, so that they stand still.

        ``first.dots`` are [seconds, seconds in the queue, hue, letter, request, prompt tokens, position], none above
        ``MOST_DOTS``; ``first.waiting`` are [seconds so far, hue, letter, request].
        """
        fold = history.fold(LatencyFold)
        position = min(position, len(history.records) - 1)
        known = position >= history.first
        num_first, num_pauses = (fold.num_first[position], fold.num_pauses[position]) if known else (0, 0)
        waiting = _waiting(history, position, fold)
        first, pauses = fold.first_tokens.distribution(num_first), fold.pauses.distribution(num_pauses)
        few = num_first - fold.firsts.first <= MOST_DOTS
        requests = fold.firsts[:num_first] if few else []
        longest = fold.longest(position)
        shortest = min([fold.first_tokens.low, *(row[0] for row in waiting)])
        farthest = max([fold.first_tokens.high, *(row[0] for row in waiting)])
        return {
            "caption": _caption(first, pauses, longest, waiting, requests),
            "bars_per_decade": BARS_PER_DECADE,
            "shortest": SHORTEST,
            "first": first
            | _axis(shortest, farthest)
            | {
                "dots": [request.dot for request in requests],
                "reasons": [request.why for request in requests] if len(requests) <= MOST_REASONS else [],
                "waiting": waiting[:MOST_WAITING],
                "num_waiting": len(waiting),
            },
            "pauses": pauses
            | _axis(fold.pauses.low, fold.pauses.high)
            | {
                "longest": None
                if longest is None
                else [longest.seconds, longest.hue, _label(longest), longest.request_id, longest.position]
            },
        }

    def svg(self, picture: Picture, palette: Palette) -> str:
        """Both panels beside each other."""
        width = (WIDTH - 40) / 2
        second = f'<g transform="translate({width + 40:g},0)">{_svg_pauses(picture, width, palette)}</g>'
        body = _svg_first(picture, width, palette) + second
        return document(WIDTH, HEIGHT, body, plain(picture["caption"]))


# ---------------------------------------------------------------------- what is in the picture


def _waiting(history: History, position: int, fold: LatencyFold) -> list[list[Any]]:
    """Requests without any token after a record: [seconds since they arrived, hue, letter, request], the longest first."""
    state = history.state_at(position)
    if state.record is None:
        return []
    found: dict[RequestLatency, int | None] = {}
    for sequence in state.alive():
        request = fold.request_of(sequence.sequence_id)
        none_yet = request is not None and (request.first_position is None or request.first_position > position)
        if request is not None and none_yet and not sequence.ended:
            found.setdefault(request, sequence.hue)
    now = state.record.updated_at
    rows = [[max(SHORTEST, now - r.arrived_at), number, r.letter, r.request_id] for r, number in found.items()]
    return sorted(rows, key=lambda row: -row[0])


def _label(pause: Pause) -> str:
    return f"{pause.letter}, {pause.cause}: {seconds_text(pause.seconds)}"


def _axis(low: float, high: float) -> dict[str, Any]:
    """Ends of an axis, and ticks at 1, 2 and 5 of each decade, or at whole decades when these are many."""
    if high <= 0:
        low, high = 0.01, 1.0
    steps = [factor * 10.0**decade for decade in range(-7, 6) for factor in (1, 2, 5)]
    before, after = [s for s in steps if s <= low * 0.98], [s for s in steps if s >= high * 1.02]
    low, high = (before or steps)[-1 if before else 0], (after or steps[-1:])[0]
    if high < 9.9 * low:
        high = next(s for s in steps if s >= 9.9 * low)
    ticks = [s for s in steps if low * 0.999 <= s <= high * 1.001]
    if len(ticks) > 9:
        ticks = [s for s in ticks if math.isclose(10 ** round(math.log10(s)), s)]
    return {"axis": [low, high], "ticks": [[s, _tick_text(s)] for s in ticks]}


def _tick_text(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size * 0.999:
            return f"{seconds / size:,.0f} {unit}"
    return f"{seconds * 1e6:.1f} µs"


def seconds_text(seconds: float) -> str:
    """Three digits: ``420 µs``, ``10.7 ms``, ``467 ms``, ``1.08 s``."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size * 0.9995 or unit == "µs":
            value = seconds / size
            return f"{value:,.{0 if value >= 99.95 else 1 if value >= 9.995 or unit != 's' else 2}f} {unit}"
    raise AssertionError("unreachable")


def _caption(
    first: dict[str, Any],
    pauses: dict[str, Any],
    longest: Pause | None,
    waiting: list[list[Any]],
    requests: list[RequestLatency],
) -> Caption:
    if not first["count"] and not pauses["count"] and not waiting:
        return [("No requests yet.", True)]
    parts: Caption = []
    if first["count"]:
        parts += [
            (f"Of {count(first['count'], 'request')}, ", False),
            (
                f"half had the first token within {seconds_text(first['p50'])}, 99% within {seconds_text(first['p99'])}",
                True,
            ),
            (f".{_slowest(requests)} ", False),
        ]
    else:
        parts.append(("No request has its first token yet. ", True))
    if pauses["count"] and longest is not None:
        parts += [
            ("After it, half of the pauses between tokens last at most ", False),
            (f"{seconds_text(pauses['p50'])}, 99% {seconds_text(pauses['p99'])}", True),
            (f"; the longest, {seconds_text(longest.seconds)}, is {longest.letter}'s, {longest.cause}. ", False),
        ]
    if waiting:
        so_far, _, letter, _ = waiting[0]
        still = "still waits for its" if len(waiting) == 1 else "still wait for their"
        parts.append((f"{count(len(waiting), 'request')} {still} first, {letter} for {seconds_text(so_far)} so far.", False))
    return [(part.rstrip() if index == len(parts) - 1 else part, bold) for index, (part, bold) in enumerate(parts)]


def _slowest(requests: list[RequestLatency]) -> str:
    """Where the slowest first token's time went; empty for one, or for more than are drawn as dots."""
    if len(requests) < 2:
        return ""
    times = [one.dot[0] for one in requests]
    request = requests[times.index(max(times))]
    seconds, queued, *_ = request.dot
    why = f" ({request.why.removeprefix('waits: ')})" if request.why else ""
    return f" {request.letter} took longest, {seconds_text(seconds)}, of which {seconds_text(queued)} in the queue{why}."


# ---------------------------------------------------------------------- without a browser


def _scale(axis: list[float], width: float) -> Any:
    """Seconds to pixels."""
    low = math.log10(axis[0])
    factor = (width - LEFT - RIGHT) / (math.log10(axis[1]) - low)
    return lambda seconds: LEFT + (math.log10(max(axis[0], seconds)) - low) * factor


def _svg_frame(title: str, note: str, panel: dict[str, Any], width: float, palette: Palette) -> str:
    at = _scale(panel["axis"], width)
    body = [text(0, 7, title, palette["ink"], size=12, weight=550), text(width, 7, note, palette["ink2"], anchor="end")]
    for seconds, label in panel["ticks"]:
        body.append(rect(round(at(seconds), 1) - 0.5, TOP, 1, BOTTOM - TOP, palette["rule"]))
        body.append(text(round(at(seconds), 1), BOTTOM + 12, label, palette["ink3"], size=10, anchor="middle"))
    return "".join(body)


def _svg_quantiles(panel: dict[str, Any], width: float, palette: Palette) -> str:
    if not panel["count"]:
        return ""
    at, body = _scale(panel["axis"], width), []
    for name, anchor, side in (("p50", "end", -4), ("p99", "start", 4)):
        x = round(at(panel[name]), 1)
        body.append(rect(x - 0.75, TOP + 14, 1.5, BOTTOM - TOP - 14, palette["ink"]))
        label = f"{name} {seconds_text(panel[name])}"
        if anchor == "start" and x + side + 7 * len(label) > width:
            x, side, anchor = width, 0, "end"
        body.append(text(x + side, TOP + 8, label, palette["ink"], weight=550, anchor=anchor))
    return "".join(body)


def _svg_bars(picture: Picture, panel: dict[str, Any], width: float, palette: Palette) -> str:
    at, body, most = _scale(panel["axis"], width), [], max(panel["bars"], default=1)
    for index, number in enumerate(panel["bars"]):
        if not number:
            continue
        x, end = (
            at(picture["shortest"] * 10 ** ((panel["first_bar"] + index + more) / picture["bars_per_decade"]))
            for more in (0, 1)
        )
        height = max(1.5, (BOTTOM - TOP - 30) * number / most)
        body.append(
            rect(round(x, 1), round(BOTTOM - height, 1), round(max(1, end - x - 1), 1), round(height, 1), palette["tint"])
        )
    return "".join(body)


def swarm(xs: list[float], step: float, lanes: int) -> list[int]:
    """A lane for each dot, from the middle outwards (0, 1, -1, 2, …), so that none covers another; ``xs`` are sorted.

    Where all lanes are full, dots overlap in the one that ends farthest left.
    """
    order = [(lane + 1) // 2 * (1 if lane % 2 else -1) for lane in range(lanes)]
    ends = [-math.inf] * lanes
    chosen = []
    for x in xs:
        free = next((index for index, end in enumerate(ends) if end <= x - step), None)
        index = min(range(lanes), key=ends.__getitem__) if free is None else free
        ends[index] = x
        chosen.append(order[index])
    return chosen


def _svg_first(picture: Picture, width: float, palette: Palette) -> str:
    panel = picture["first"]
    as_bars = panel["count"] > MOST_DOTS
    note = "a bar counts requests" if as_bars else "a dot is a request, a ring one that still waits"
    body = [_svg_frame("Time to first token", note, panel, width, palette)]
    body.append(text(0, 86, count(panel["count"], "request"), palette["ink"], weight=550))
    if panel["num_waiting"]:
        body.append(text(0, 102, f"{panel['num_waiting']:,} still waiting", palette["ink2"]))
    if as_bars:
        return "".join([*body, _svg_bars(picture, panel, width, palette), _svg_quantiles(panel, width, palette)])
    body.append(_svg_quantiles(panel, width, palette))
    at = _scale(panel["axis"], width)
    marks = [(at(dot[0]), dot[2], True, f"{dot[3]} {seconds_text(dot[0])}") for dot in panel["dots"]]
    marks += [(at(row[0]), row[1], False, f"{row[2]} waits for {seconds_text(row[0])} so far") for row in panel["waiting"]]
    marks.sort(key=lambda mark: mark[0])
    radius, step, lanes = dot_size(len(marks))
    for (x, number, solid, title), lane in zip(marks, swarm([mark[0] for mark in marks], step, lanes), strict=True):
        colour = hue(palette, number)
        form = f'r="{radius}" fill="{colour}"' if solid else f'r="{radius - 0.8:g}" fill="none" stroke="{colour}"'
        y = (TOP + 16 + BOTTOM) / 2 + lane * step
        body.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" {form}><title>{title}</title></circle>')
    return "".join(body)


def dot_size(number: int) -> tuple[float, float, int]:
    """Radius, distance of lanes, and lanes for so many dots."""
    radius = 4.2 if number <= 150 else 3.0 if number <= 600 else 2.0
    step = 2 * radius + 0.8
    return radius, step, int((BOTTOM - TOP - 20) / step)


def _svg_pauses(picture: Picture, width: float, palette: Palette) -> str:
    panel = picture["pauses"]
    body = [
        _svg_frame("Time between tokens", "pauses of a sequence", panel, width, palette),
        text(0, 86, count(panel["count"], "pause"), palette["ink"], weight=550),
        _svg_bars(picture, panel, width, palette),
        _svg_quantiles(panel, width, palette),
    ]
    if panel["longest"] is not None:
        seconds, number, label, _, _ = panel["longest"]
        x = _scale(panel["axis"], width)(seconds)
        ring = f'r="4.2" fill="{palette["bg"]}" stroke="{hue(palette, number)}" stroke-width="2"'
        body.append(f'<circle cx="{x:.1f}" cy="{BOTTOM - 40}" {ring}/>')
        wide = 6 * len(label)
        side, anchor = (9, "start") if x + 9 + wide < width else (-9, "end")
        left = x + 7 if side > 0 else x - 11 - wide
        body.append(rect(round(left, 1), BOTTOM - 48, wide + 4, 16, palette["bg"], 'opacity="0.85"'))
        body.append(text(round(x + side, 1), BOTTOM - 40, label, palette["ink2"], anchor=anchor))
    return "".join(body)


FIGURE = LatencyView()
