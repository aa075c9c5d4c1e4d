"""The drawing of BatchTimeline without a browser: the same layout as static/batch_timeline.js."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from textwrap import wrap

from refimpl.visualizers.figure import WIDTH, Picture, count, document, duration, plain, rect, text
from refimpl.visualizers.palette import Palette, hue, mix
from refimpl.visualizers.timeline_marks import PALE, cells, ended, hatching, triangle

X0, X1, Y0 = 56, WIDTH - 196, 22
TOKENS, BLOCKS = 64, 56
TIP_CHARS = 42
"""Characters of a line of the sentence at the latest wait."""
TIP_ROWS = 10
"""Room for it, if there are fewer rows."""


@dataclass(frozen=True)
class Layout:
    """Where things stand, in pixels."""

    top: float
    row: int
    """Pitch of the rows; ``height`` is that of their cells."""
    height: int
    column: float
    rows_end: float

    @property
    def tokens(self) -> float:
        """The top of the chart of tokens; ``blocks`` is that of blocks."""
        return self.rows_end + 20

    @property
    def blocks(self) -> float:
        """See ``tokens``."""
        return self.tokens + TOKENS + 26


def layout(picture: Picture) -> Layout:
    """The layout of a picture."""
    top = _overview_height(picture) + Y0
    rows = len(picture["rows"])
    pitch = 19 if rows <= 24 else 15 if rows <= 36 else 13 if rows <= 48 else 11
    hidden = 16 if picture["num_hidden"] else 0
    height = pitch - (5 if pitch > 15 else 3 if pitch > 11 else 2)
    room = max(rows, TIP_ROWS if picture["holds"] else 3)
    return Layout(top, pitch, height, (X1 - X0) / picture["columns"], top + room * pitch + 8 + hidden)


def draw(picture: Picture, palette: Palette) -> str:
    """Overview, rows, both charts, legend."""
    at = layout(picture)
    body = hatching("refimpl-hatch", palette["ink3"], palette["faint"])
    body += hatching("refimpl-hatch-solid", palette["solid"], palette["tint"])
    body += _overview(picture, palette) + _axis(picture, at, palette)
    body += "".join(_row(picture, at, palette, index) for index in range(len(picture["rows"])))
    body += _names(picture, at, palette) + _bands(picture, at, palette) + _playhead(picture, at, palette)
    legend, height = _legend(picture, at.blocks + BLOCKS + 22, palette)
    return document(WIDTH, height, body + legend + _tip(picture, at, palette), plain(picture["caption"]))


def _runs(flat: list[int], now: int) -> Iterator[tuple[int, int, int, int, float]]:
    """(from, to, state, tokens drawn, opacity), cut at the playhead."""
    for start, end, state, drawn, _ in zip(*[iter(flat)] * 5, strict=True):
        if start < now:
            yield start, min(end, now), state, drawn, 1
        if end > now:
            yield max(start, now), end, state, drawn, PALE


def _row(picture: Picture, at: Layout, palette: Palette, index: int) -> str:
    row, y, now = picture["rows"][index], at.top + index * at.row, picture["position"] + 1
    own, first = hue(palette, row["hue"]), int(picture["first"])

    def x_of(column: int) -> float:
        return X0 + (column - first) * at.column

    def faded(column: int, drawn: str) -> str:
        return drawn if column < now else f'<g opacity="{PALE}">{drawn}</g>'

    body = ""
    for start, end, state, drawn, opacity in _runs(row["runs"], now):
        share = drawn / max(2, picture["most_drawn"])
        colours = own, palette
        shape = cells(picture["states"][state], share, x_of(start), y, at.column, end - start, at.height, colours)
        body += shape if opacity == 1 else f'<g opacity="{opacity}">{shape}</g>'
    inset = min(2.0, at.column / 5)
    for column in row["hits"]:
        body += rect(x_of(column) + inset, y + at.height / 2 - 1, max(1, at.column - 2 * inset - 0.5), 2, palette["bg"])
    if (forked := row["forked"]) is not None:
        above = index - 1 if row["parent"] is None else row["parent"]
        line = f"M{x_of(forked):.1f} {at.top + above * at.row + at.height / 2:g}V{y + at.height / 2:g}h3"
        body += faded(forked, f'<path d="{line}" stroke="{own}" stroke-width="1.5" fill="none"/>')
    if row["end"]:
        edge, told, reason = row["end"]
        body += faded(told, ended(reason, x_of(edge), y, at.height, palette["ink"]))
    for column in row["preempted"]:
        body += faded(column, triangle(x_of(column) + at.column / 2, y, min(5, at.height * 0.36), palette["signal"]))
    return body


def _names(picture: Picture, at: Layout, palette: Palette) -> str:
    size, ink = (12 if at.row > 13 else 10), palette["ink"]
    body = "".join(
        text(X1 + x, at.top - 12, title, palette["ink3"], size=10, anchor="end")
        for title, x in (("waited", 62), ("first token", 132), ("tokens", 186))
    )
    for index, row in enumerate(picture["rows"]):
        y = at.top + index * at.row
        middle = y + at.height / 2
        body += rect(0, y + 1, 4, at.height - 2, hue(palette, row["hue"]))
        body += text(10, middle, row["letter"], ink, size=size, weight=600)
        waited = "" if row["waited"] is None else f"{row['waited']:,}"
        latency = "" if row["first_token"] is None else duration(row["first_token"])
        for content, x in ((waited, 62), (latency, 132), (f"{row['tokens']:,}", 186)):
            body += text(X1 + x, middle, content, ink, size=min(11, size), anchor="end")
    if picture["num_hidden"]:
        more = f"and {picture['num_hidden']:,} more at this step, not drawn"
        body += text(X0, at.rows_end - 8, more, palette["ink2"])
    return body


def _axis(picture: Picture, at: Layout, palette: Palette) -> str:
    body = ""
    for column, step in picture["ticks"]:
        x = X0 + (column - picture["first"]) * at.column
        body += rect(x, at.top - 4, 1, at.blocks + BLOCKS - at.top + 4, palette["rule"])
        body += text(x, at.top - 12, f"{step:,}", palette["ink3"], size=10, anchor="middle")
    if not picture["steps"]:
        body += text((X0 + X1) / 2, at.top + at.row, "no requests yet", palette["ink3"], anchor="middle")
    return body


def _playhead(picture: Picture, at: Layout, palette: Palette) -> str:
    x = X0 + max(0, picture["position"] + 1 - picture["first"]) * at.column
    head = f'<path d="M{x - 4:.1f} {at.top - 9:g}h8l-4 6z" fill="{palette["ink"]}"/>'
    return rect(round(x - 0.5, 1), at.top - 5, 1.2, at.blocks + BLOCKS - at.top + 5, palette["ink"]) + head


def _bands(picture: Picture, at: Layout, palette: Palette) -> str:
    tokens, blocks, budget = picture["tokens"], picture["blocks"], picture["budget"]
    low = picture["most_tokens"] * 5 < budget
    top = max(1, picture["most_tokens"]) * 1.25 if low else budget
    label = f"{top:,.0f}; the budget is {budget:,}" if low else f"{budget:,} budget"
    hatched = "url(#refimpl-hatch)"
    used = [(tokens["decode"], palette["tint"]), (tokens["padding"], hatched), (tokens["prefill"], palette["solid"])]
    body = _band(picture, at, palette, at.tokens, TOKENS, ("tokens", "a step", label), top, used)
    held = [
        (blocks["owned"], palette["solid"]),
        (blocks["shared"], "url(#refimpl-hatch-solid)"),
        (blocks["cached"], palette["cached"]),
    ]
    num_blocks = picture["num_blocks"]
    body += _band(picture, at, palette, at.blocks, BLOCKS, ("blocks", "in use", f"{num_blocks:,} blocks"), num_blocks, held)
    keys = [(0, at.tokens + 18, palette["solid"], "prefill"), (0, at.tokens + 34, palette["tint"], "decode")]
    keys += [(80, at.tokens + 18, hatched, "for nobody")] if any(tokens["padding"]) else []
    keys += [(0, at.blocks + 18, palette["solid"], "one owner"), (80, at.blocks + 18, palette["cached"], "cached")]
    keys += [(0, at.blocks + 34, "url(#refimpl-hatch-solid)", "shared")]
    for x, y, fill, name in keys:
        body += rect(X1 + 8 + x, y, 9, 9, fill) + text(X1 + 22 + x, y + 5, name, palette["ink2"])
    return body


def _band(
    picture: Picture,
    at: Layout,
    palette: Palette,
    y: float,
    height: int,
    labels: tuple[str, str, str],
    top: float,
    series: list[tuple[list[int], str]],
) -> str:
    """Stacked columns, ``top`` at full height; those after the playhead are pale."""
    body = rect(X0, y, X1 - X0, 1, palette["ink3"])
    body += text(0, y + 6, labels[0], palette["ink"], weight=600) + text(0, y + 20, labels[1], palette["ink2"])
    body += text(X1 + 8, y, labels[2], palette["ink2"]) + text(X1 + 8, y + height, "0", palette["ink3"], size=10)
    width = at.column - 1 if labels[0] == "tokens" and at.column > 3 else at.column + 0.3
    now = picture["position"] + 1 - picture["first"]
    bottoms = [y + height] * len(picture["steps"])
    for values, fill in series:
        paths = ["", ""]
        for index, value in enumerate(values):
            if tall := value / top * height:
                bottoms[index] -= tall
                shape = f"M{X0 + index * at.column:.1f} {bottoms[index]:.1f}h{width:.1f}v{tall:.1f}h{-width:.1f}z"
                paths[index >= now] += shape
        for path, opacity in zip(paths, (1, PALE), strict=True):
            body += f'<path d="{path}" fill="{fill}" opacity="{opacity}"/>' if path else ""
    return body


def _legend(picture: Picture, y: float, palette: Palette) -> tuple[str, float]:
    """What each form means, and the height of the whole picture; what is rare is only told where it is in sight."""
    colours = hue(palette, 0), palette

    def cell(state: str) -> Callable[[float, float], str]:
        return lambda x, y: cells(state, 0.5, x, y, 16, 1, 12, colours)

    def end(reason: str) -> Callable[[float, float], str]:
        return lambda x, y: ended(reason, x + 6, y, 12, palette["ink"])

    seen = {picture["states"][state] for row in picture["rows"] for state in row["runs"][2::5]}
    ends = {row["end"][2] for row in picture["rows"] if row["end"]}
    decode = "decode, height = tokens that round" if picture["most_drawn"] > 1 else "decode, one token a step"
    items: list[tuple[str, Callable[[float, float], str]]] = [
        ("waiting", cell("waiting")),
        ("prefill chunk", cell("prefill")),
        ("prefill after a prefix hit", lambda x, y: cell("prefill")(x, y) + rect(x + 3, y + 5, 10, 2, palette["bg"])),
        (decode, lambda x, y: cells("decode", 0.5, x, y, 5.4, 3, 12, colours)),
        ("preempted", lambda x, y: triangle(x + 8, y + 4, 5, palette["signal"])),
        ("recompute: queued again", cell("queued")),
        ("finished", end("stop")),
        *([("swapped out", cell("swapped"))] if "swapped" in seen else []),
        *([("computed after its end, for nobody", cell("padding"))] if "padding" in seen else []),
        *([("aborted", end("abort"))] if "abort" in ends else []),
        *([("failed", end("error"))] if "error" in ends else []),
    ]
    body, x = "", float(X0)
    for name, demo in items:
        width = 42 + 5.9 * len(name)
        if x + width > WIDTH and x > X0:
            x, y = X0, y + 20
        body += demo(x, y - 6) + text(x + 22, y, name, palette["ink2"])
        x += width
    return body, y + 10


def _tip(picture: Picture, at: Layout, palette: Palette) -> str:
    """The latest wait for memory: a box on its cell, and the scheduler's sentence beside it."""
    if (tip := picture["tip"]) is None:
        return ""
    ink, step = palette["ink"], picture["steps"][tip["column"] - picture["first"]]
    told = f"so told in step {tip['told']:,}; " if tip["told"] != step else ""
    note = wrap(f"{told}blocks that running sequences still need are left out", TIP_CHARS)
    lines = [f"{picture['rows'][tip['row']]['letter']}, step {step:,}", *wrap(tip["text"], TIP_CHARS), *note]
    width, height = 7 * max(map(len, lines)) + 18, 16 * len(lines) + 10
    x = X0 + (tip["column"] - picture["first"] + 0.5) * at.column
    y = at.top + tip["row"] * at.row + at.height / 2
    left = X0 + 14 if x - X0 - 34 > width else min(x + 14, WIDTH - width)
    top = _tip_top(at, y, height)
    frame = f'stroke="{ink}" fill="none"'
    body = f'<rect x="{x - at.column / 2 - 1.5:.1f}" y="{y - at.height / 2 - 2:g}" '
    body += f'width="{at.column + 3:.1f}" height="{at.height + 4}" {frame}/>'
    if left == X0 + 14:
        body += f'<path d="M{x:.1f} {y + at.height / 2 + 2:g}V{top + 20:g}H{left + width:.1f}" {frame}/>'
    body += rect(left, top, width, height, palette["bg"], f'stroke="{ink}" rx="3"')
    for index, line in enumerate(lines):
        colour, weight = (palette["ink2"], 400) if index >= len(lines) - len(note) else (ink, 600 if index else 400)
        body += text(left + 9, top + 13 + 16 * index, line, colour, size=12, weight=weight)
    return body


def _tip_top(at: Layout, y: float, height: float) -> float:
    """On the rows, below the cell or above it, never on the charts: what a step computed is part of why."""
    end, above = at.rows_end + 12 - height, y - at.height / 2 - 6 - height
    below = next((top for top in (y + 2.4 * at.row, y + 14) if top <= end), None)
    return below if below is not None else above if above >= at.top - Y0 + 4 else end


# ---------------------------------------------------------------------- the whole log


def _line_height(picture: Picture) -> int:
    lines = len(picture["overview"]["lines"])
    return 6 if lines <= 12 else 3 if lines <= 32 else 2


def _overview_height(picture: Picture) -> int:
    if picture["overview"] is None:
        return 0
    return int(max(54, len(picture["overview"]["lines"]) * _line_height(picture))) + 46


def _overview(picture: Picture, palette: Palette) -> str:
    """The whole log as a grid of merged states, with the window that is shown below it."""
    if (overview := picture["overview"]) is None:
        return ""
    waits, again = mix(palette["tint"], palette["bg"], 0.62), mix(palette["signal"], palette["bg"], 0.6)
    fills = {"waiting": waits, "idle": waits, "padding": palette["cached"], "decode": palette["tint"]}
    fills |= {"prefill": palette["solid"], "queued": again, "swapped": again, "preempted": palette["signal"]}
    column, height, y0 = (X1 - X0) / overview["length"], _line_height(picture), 16
    body = text(0, y0 + 6, "whole", palette["ink"], weight=600) + text(0, y0 + 20, "log", palette["ink2"])
    paths = dict.fromkeys(fills, "")
    for line, runs in enumerate(overview["lines"]):
        x = float(X0)
        for state, bins in zip(runs[::2], runs[1::2], strict=True):
            width = bins * overview["steps_per_bin"] * column
            if (name := picture["states"][state]) in paths:
                paths[name] += f"M{x:.1f} {y0 + line * height}h{max(1.5, min(X1 - x, width)):.1f}v{height}H{x:.1f}z"
            x += width
    body += "".join(f'<path d="{path}" fill="{fills[name]}"/>' for name, path in paths.items() if path)
    high = _overview_height(picture) - 46
    x = X0 + picture["first"] * column
    width = max(3, min(picture["columns"] * column, X1 - x))
    body += rect(round(x, 1), y0 - 3, round(width, 1), high + 6, "none", f'stroke="{palette["ink"]}" stroke-width="1.5"')
    body += rect(round(X0 + (picture["position"] + 1) * column, 1), y0 - 6, 1.2, high + 12, palette["ink"])
    body += text(X1, 6, f"step {overview['last_step']:,}", palette["ink3"], size=10, anchor="end")
    a_line = f", {overview['rows_per_line']} a line" if overview["rows_per_line"] > 1 else ""
    body += text(X1 + 8, y0 + 4, count(overview["num_rows"], "sequence") + a_line, palette["ink2"])
    keys = ("waiting", "decode", "prefill", "queued", "preempted")
    for index, name in enumerate(keys):
        x, y = X1 + 8 + 80 * (index > 2), y0 + 14 + index % 3 * 15
        label = "queued again" if name == "queued" else name
        body += rect(x, y, 9, 9, fills[name]) + text(x + 14, y + 5, label, palette["ink2"])
    return body
