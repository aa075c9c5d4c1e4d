"""Batching: what does waiting for the longest answer cost? Two runs, static and continuous, on one scale."""

from __future__ import annotations

from typing import Any

from refimpl.visualizers.figure import WHOLE, WIDTH, Caption, Look, Picture, count, document, duration, plain, rect, text
from refimpl.visualizers.history import History
from refimpl.visualizers.palette import Palette, hue, mix
from refimpl.visualizers.timeline_marks import PALE, hatching, triangle
from refimpl.visualizers.timeline_rows import Timeline
from refimpl.visualizers.timeline_runs import STATES, Row
from refimpl.visualizers.words import percent

MOST_ROWS = 160
"""Rows of a side: two pixels each, at the least."""
HEIGHT = 320
"""Pixels of a side's rows, at most."""
X0, GAP = 34, 40

HOW = {
    "static": "a batch, of {slots} at most, runs until its longest answer ends",
    "continuous": "the batch is chosen anew at each step",
}


class Batching:
    """Two runs of the same requests. Unlike other figures it has logs of its own, and shows the whole of them.

    Args:
        histories: by name, such as "static" and "continuous".

    """

    name = "batching"
    title = "Static and continuous batching"
    question = "What does waiting for the longest answer cost?"
    folds = ()

    def __init__(self, histories: dict[str, History]) -> None:
        self.histories = histories

    def picture(self, history: History | None = None, position: int | None = None, look: Look = WHOLE) -> Picture:
        """Both runs, to their ends."""
        return compare(self.histories)

    def svg(self, picture: Picture, palette: Palette) -> str:
        """The same without a browser."""
        return draw(picture, palette)


def compare(histories: dict[str, History], position: int | None = None) -> Picture:
    """Runs side by side, over as many steps as the longest has. A request has the hue that it has in the last of them."""
    timelines = {name: history.fold(Timeline) for name, history in histories.items()}
    hues = {row.name: row.hue for timeline in timelines.values() for row in timeline.rows}
    sides = [_side(name, timelines[name], histories[name], hues, position) for name in histories]
    columns = max((side["length"] for side in sides), default=0)
    return {
        "caption": _caption(sides, list(timelines.values())),
        "states": STATES,
        "columns": max(1, columns),
        "every": _every(columns),
        "rows": max((len(side["rows"]) for side in sides), default=0),
        "sides": sides,
    }


def _every(columns: int) -> int:
    """Columns between numbers of the axis: 20, 50, 100, 200, …, so that there are at most ten."""
    every = 20
    while columns > 10 * every:
        every = every * 5 // 2 if str(every)[0] == "2" else every * 2
    return every


def _side(
    name: str, timeline: Timeline, history: History, hues: dict[str, int | None], position: int | None
) -> dict[str, Any]:
    length = len(timeline)
    seconds = timeline.ended_at - (timeline.started_at or 0.0)
    rate = timeline.num_drawn / seconds if seconds else 0.0
    return {
        "name": name,
        "how": HOW.get(name, "").format(slots=history.config["max_num_seqs"]),
        "length": length,
        "position": length - 1 if position is None else max(-1, min(position, length - 1)),
        "seconds": seconds,
        "tokens": timeline.num_drawn,
        "told": f"{count(length, 'step')}, {duration(seconds)}, {rate:,.0f} tokens/s",
        "padded_steps": timeline.padded_steps,
        "slot_steps": timeline.slot_steps,
        "note": _padding(timeline),
        "rows": [_row(row, hues, length) for row in timeline.rows[:MOST_ROWS]],
        "num_hidden": max(0, len(timeline.rows) - MOST_ROWS),
    }


def _padding(timeline: Timeline) -> str:
    if not timeline.padded_steps:
        return "no slot is held by a finished answer"
    share = percent(timeline.padded_steps, timeline.slot_steps)
    return f"grey: {share} of slot-steps are held by finished answers"


def _row(row: Row, hues: dict[str, int | None], length: int) -> dict[str, Any]:
    return {
        "letter": row.letter,
        "request": row.request_id,
        "first": row.first_sample,
        "hue": hues[row.name],
        "runs": row.runs(0, length),
        "preempted": list(row.preemptions),
    }


def _caption(sides: list[dict[str, Any]], timelines: list[Timeline]) -> Caption:
    if len(sides) < 2 or not all(side["length"] for side in sides):
        return [("No requests yet.", True)]
    first, last = sides[0], sides[-1]
    ratio = first["length"] / last["length"]
    answer = (
        f"{first['name'].capitalize()} batching takes {count(first['length'], 'step')} where {last['name']} takes "
        f"{last['length']:,}, {ratio:.2f} times as many."
    )
    if first["padded_steps"]:
        share = percent(first["padded_steps"], first["slot_steps"])
        answer = f"{answer[:-1]}; {share} of its slot-steps are held by answers that have ended."
    names = [
        sorted((row.name, row.sums(len(timeline))[1]) for row in timeline.rows) for timeline in (timelines[0], timelines[-1])
    ]
    requests = count(timelines[0].columns[-1].num_requests, "request")
    if names[0] == names[1]:
        rest = (
            f" The same {requests}, as many tokens each: only the moment at which one may join or leave the batch differs."
        )
    else:
        rest = " The runs did not serve the same requests to the same lengths, so their steps do not compare."
    return [(answer, True), (rest, False)]


# ---------------------------------------------------------------------- without a browser


def pitch(rows: int) -> int:
    """Pixels from row to row."""
    return max(2, min(10, HEIGHT // max(1, rows)))


def draw(picture: Picture, palette: Palette) -> str:
    """The sides, one beside the other."""
    width = (WIDTH - GAP * (len(picture["sides"]) - 1)) / max(1, len(picture["sides"]))
    body = hatching("refimpl-hatch-pale", palette["ink3"], palette["bg"])
    for index, side in enumerate(picture["sides"]):
        body += f'<g transform="translate({index * (width + GAP):g},0)">{_draw_side(picture, side, width, palette)}</g>'
    height = 24 + picture["rows"] * pitch(picture["rows"]) + 40
    return document(WIDTH, height, body, plain(picture["caption"]))


def _draw_side(picture: Picture, side: dict[str, Any], width: float, palette: Palette) -> str:
    column, tall, y0 = (width - X0 - 8) / picture["columns"], pitch(picture["rows"]), 24
    bottom = y0 + picture["rows"] * tall
    title = side["name"].capitalize()
    body = text(X0, 8, title, palette["ink"], size=12, weight=620)
    body += text(X0 + 8 + 7.4 * len(title), 8, side["how"], palette["ink2"])
    for step in range(0, picture["columns"] + 1, picture["every"]):
        body += rect(X0 + step * column, y0, 1, bottom - y0 + 4, palette["rule"])
        body += text(X0 + step * column, bottom + 12, f"{step:,}", palette["ink3"], size=10, anchor="middle")
    for state in range(1, len(STATES)):  # by priority: where steps share a pixel, the higher state is on top
        body += "".join(_draw_runs(side, row, index, state, column, tall, palette) for index, row in enumerate(side["rows"]))
    for index, row in enumerate(side["rows"]):
        y = y0 + index * tall
        if row["first"] and tall >= 9:
            body += text(X0 - 8, y + 4, row["letter"].partition("·")[0], palette["ink2"], size=10, anchor="end")
        for at in row["preempted"]:
            x = X0 + (at + 0.5) * column
            body += (
                triangle(x, y + 1, 3, palette["signal"]) if tall >= 8 else rect(x - 0.75, y, 1.5, tall, palette["signal"])
            )
    body += rect(round(X0 + (side["position"] + 1) * column, 1), y0, 1.3, bottom - y0 + 2, palette["ink"])
    body += text(X0, bottom + 30, side["told"], palette["ink"], size=12, weight=620)
    more = f"; {side['num_hidden']:,} more sequences are not drawn" if side["num_hidden"] else ""
    return body + text(X0 + 226, bottom + 30, side["note"] + more, palette["ink2"])


def _draw_runs(
    side: dict[str, Any], row: dict[str, Any], index: int, state: int, column: float, tall: int, palette: Palette
) -> str:
    body, now, y, own = "", side["position"] + 1, 24 + index * tall, hue(palette, row["hue"])
    thick = max(1, tall - 2.5)
    forms = {
        "waiting": (tall / 2 - 0.5, 0.8, palette["ink3"]),
        "idle": (tall / 2 - 0.5, 0.8, palette["ink3"]),
        "queued": (tall / 2 - 0.5, 0.8, palette["signal"]),
        "swapped": (tall / 2 - 1.5, 3, mix(own, palette["bg"], 0.5)),
        "padding": (tall * 0.25, tall / 2, "url(#refimpl-hatch-pale)" if tall >= 6 else palette["cached"]),
        "prefill": (tall - thick - 1, thick, own),
        "decode": (tall - thick - 1, thick, mix(own, palette["bg"], 0.3)),
    }
    if (form := forms.get(STATES[state])) is None:
        return ""
    for start, end, kind, _, _ in zip(*[iter(row["runs"])] * 5, strict=True):
        for a, b, opacity in ((start, min(end, now), 1), (max(start, now), end, PALE)) if kind == state else ():
            if a < b:
                faded = f'opacity="{opacity}"' if opacity < 1 else ""
                shape = rect(
                    round(X0 + a * column, 1), y + form[0], round(max(0.6, (b - a) * column), 1), form[1], form[2], faded
                )
                body += shape
    return body
