"""BatchTimeline: why did this request wait? One row a sequence, one column a step.

A picture holds a window of the log around the position, with at most ``MOST_ROWS`` rows. A longer run is told whole by an
overview above it, a small grid in which events are never averaged away.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import chain, islice
from operator import attrgetter
from typing import Any

from refimpl.visualizers import batch_timeline_svg
from refimpl.visualizers.figure import WHOLE, Caption, Look, Picture, count
from refimpl.visualizers.history import History
from refimpl.visualizers.palette import Palette
from refimpl.visualizers.timeline_books import CAUSES, MEMORY, Column, Hold, cause_of
from refimpl.visualizers.timeline_rows import Timeline
from refimpl.visualizers.timeline_runs import GONE, QUEUED, STATES, SWAPPED, WAITING, Row

SHOWN = 240
"""Most columns of a window: four pixels each at full width."""
FEWEST = 30
"""Columns of a young log's window: it grows by tens."""
MOST_ROWS = 64
LEFT, RIGHT, NARROW_RIGHT, WIDE = 56, 196, 12, 900
"""Pixels beside the columns, and the width from which on the sums stand at the right: as in batch_timeline.js."""

_FORM = (
    " Colour names the request, form names what the step did for it. Steps after the playhead are pale. "
    "Right, over the whole log: steps waited, time to first token, tokens."
)


class BatchTimeline:
    """When each sequence waited, was computed and was preempted, with the scheduler's reasons."""

    name = "batch_timeline"
    title = "BatchTimeline"
    question = "Why did this request wait?"
    folds = (Timeline,)

    def picture(self, history: History, position: int, look: Look = WHOLE) -> Picture:
        """The window around ``position``: rows of runs, what each step computed, and the blocks after it."""
        timeline = history.fold(Timeline)
        oldest = timeline.columns.first
        position = max(oldest - 1, min(position, len(timeline) - 1))
        first, columns = window(len(timeline) - oldest, position - oldest, columns_in(look.width))
        first += oldest
        last = min(len(timeline), first + columns)
        shown = chosen_rows(timeline, first, last, max(first, position), look.pinned)
        steps = timeline.columns[first:last]
        known = position >= oldest
        num_alive = timeline.columns[position].num_alive if known else 0
        num_shown = sum(row.at(position)[0] != GONE for row in shown) if known else 0
        whole = len(timeline) <= columns and len(shown) == len(timeline.rows)
        return {
            "caption": caption(timeline, position, history.last.truncated),
            "position": position,
            "first": first,
            "columns": columns,
            "last": last,
            "states": STATES,
            "steps": [column.step for column in steps],
            "ticks": ticks(steps, first, 10 if columns <= 120 else 20),
            "rows": _rows(timeline, shown, first, last),
            "num_hidden": num_alive - num_shown,
            "holds": [_hold(timeline, hold) for hold in timeline.holds.between(first, last)],
            "tip": _tip(timeline, shown, position, first),
            "most_drawn": timeline.most_drawn,
            "tokens": _series(steps, "prefill", "decode", "padding"),
            "budget": history.config["max_num_batched_tokens"],
            "most_tokens": timeline.most_tokens,
            "blocks": _series(steps, "owned", "shared", "cached"),
            "num_blocks": history.config["num_blocks"],
            "overview": None if whole else _overview(timeline),
        }

    def svg(self, picture: Picture, palette: Palette) -> str:
        """The same without a browser, as wide as a notebook."""
        return batch_timeline_svg.draw(picture, palette)


def _series(steps: list[Column], *names: str) -> dict[str, list[int]]:
    """Some numbers of the columns, by name."""
    return {name: list(map(attrgetter(name), steps)) for name in names}


def columns_in(width: int) -> int:
    """How many columns a figure of so many pixels shows: four pixels each, in tens."""
    plot = width - LEFT - (RIGHT if width >= WIDE else NARROW_RIGHT)
    return max(FEWEST, min(SHOWN, plot // 40 * 10))


def window(length: int, position: int, most: int = SHOWN) -> tuple[int, int]:
    """(first column, columns) to show of a log. It stays where it is while the position moves by less than a page."""
    if length <= most:
        return 0, max(FEWEST, -(-length // 10) * 10)
    page = most // 4
    latest = -(-(length - most) // page) * page
    return max(0, min(latest, (position // (2 * page)) * 2 * page - page)), most


def ticks(steps: list[Column], first: int, every: int) -> list[list[int]]:
    """[column, step] where the axis has a number: the columns at which the step number passes a multiple of ``every``."""
    found = []
    for index, column in enumerate(steps):
        before = steps[index - 1].step if index else column.step - 1
        if column.step // every != before // every:
            found.append([first + index, column.step])
    return found


def chosen_rows(timeline: Timeline, first: int, last: int, position: int, pinned: str | None = None) -> list[Row]:
    """Rows that are there between two columns, in order of arrival; where they are too many, those nearest the position.

    The pinned request's go before all others. Then who holds a slot there, then who was preempted, then the queue from its
    head. O(rows chosen from), not O(rows), but for a pinned request.
    """
    near = timeline.presence.nearest(first, last, position, 4 * MOST_ROWS)
    indices = {*near, *timeline.around(first), *timeline.around(position)}
    if pinned is not None:
        indices.update(row.index for row in timeline.rows if row.request_id == pinned)
    found = timeline.rows.pick(sorted(indices))
    found = [row for row in found if row.arrived < last and (row.arrived >= first or row.stays_until(first))]
    if len(found) <= MOST_ROWS:
        return found
    ranks: tuple[list[Row], ...] = [], [], [], [], []
    for row in found:
        if pinned is None and len(ranks[1]) == MOST_ROWS:
            break
        ranks[0 if row.request_id == pinned else _RANKS[row.at(position)[0]]].append(row)
    ranks[-1].sort(key=lambda row: row.arrived - position if row.arrived > position else position - (row.gone or 0))
    return sorted(islice(chain(*ranks), MOST_ROWS), key=attrgetter("index"))


_RANKS = dict.fromkeys(range(len(STATES)), 1) | {QUEUED: 2, SWAPPED: 2, WAITING: 3, GONE: 4}
"""By state, the lower ones are shown rather; 0 is for who is pinned."""


def caption(timeline: Timeline, position: int, truncated: bool) -> Caption:
    """How many requests have waited up to a position, how long, and for what."""
    if not timeline.columns:
        return [("No requests yet.", True)]
    parts: Caption = [("The log begins in the middle of a run. ", False)] if truncated else []
    if position < timeline.columns.first:
        return [*parts, ("Before the first step.", True), (_FORM, False)]
    column = timeline.columns[position]
    return [*parts, (f"Up to step {column.step:,}, ", False), (waits_told(column), True), (_FORM, False)]


def waits_told(column: Column) -> str:
    """``9 of 14 requests waited, 141 steps in all: 98 for memory, 43 for a slot; 2 preemptions.``"""
    requests = count(column.num_requests, "request")
    preemptions = f"; {count(column.num_preemptions, 'preemption')}." if column.num_preemptions else "."
    if not sum(column.waits):
        return f"none of {requests} waited{preemptions}"
    causes = sorted(((steps, cause) for steps, cause in zip(column.waits, CAUSES, strict=True) if steps), reverse=True)
    why = ", ".join(f"{steps:,} for {cause}" for steps, cause in causes)
    return f"{column.num_waited:,} of {requests} waited, {count(sum(column.waits), 'step')} in all: {why}{preemptions}"


def _rows(timeline: Timeline, shown: list[Row], first: int, last: int) -> list[dict[str, Any]]:
    place = {row.index: index for index, row in enumerate(shown)}
    parents = [None if row.parent is None else place.get(row.parent) for row in shown]
    return [_row(timeline, row, first, last) | {"parent": parent} for row, parent in zip(shown, parents, strict=True)]


def _row(timeline: Timeline, row: Row, first: int, last: int) -> dict[str, Any]:
    waited, tokens = row.sums(len(timeline))
    begins = row.first_sample or row.forked is None
    latency = None if row.first_token_at is None or not begins else row.first_token_at - row.arrived_at
    oldest = bisect_left(row.decisions, (timeline.columns.first,))
    start = max(oldest, bisect_left(row.decisions, (first,)) - 1)
    decisions = row.decisions[start : bisect_left(row.decisions, (last,))]
    steps = timeline.columns.pick(column for column, _ in decisions)
    return {
        "letter": row.letter,
        "name": row.name,
        "request": row.request_id,
        "hue": row.hue,
        "forked": row.forked if row.forked is not None and first <= row.forked < last else None,
        "runs": row.runs(first, last),
        "preempted": _between(row.preemptions, first, last),
        "hits": _between(row.hits, first, last),
        "end": row.end if row.end is not None and first <= row.end[0] <= last else None,
        "waited": waited if begins else None,
        "first_token": latency,
        "tokens": tokens,
        "reasons": [[column, told.step, text] for (column, text), told in zip(decisions, steps, strict=True)],
    }


def _between(columns: list[int], first: int, last: int) -> list[int]:
    return columns[bisect_left(columns, first) : bisect_left(columns, last)] if columns else []


def _hold(timeline: Timeline, hold: Hold) -> list[Any]:
    """[first column, column after the last one, letter, sentence, the step that told it, whether it is for memory]."""
    letter = timeline.rows[hold.row].letter
    return [hold.since, hold.until, letter, hold.text, hold.told, cause_of(hold.kind) == MEMORY]


def _tip(timeline: Timeline, shown: list[Row], position: int, first: int) -> dict[str, Any] | None:
    """The latest wait for memory up to a position, if it is in sight."""
    hold = timeline.holds.for_memory_before(position)
    if hold is None:
        return None
    column = position if hold.until is None else min(position, hold.until - 1)
    row = next((index for index, row in enumerate(shown) if row.index == hold.row), None)
    if row is None or column < first:
        return None
    return {"row": row, "column": column, "text": hold.text, "told": hold.told}


def _overview(timeline: Timeline) -> dict[str, Any]:
    overview = timeline.overview
    return {
        "lines": overview.lines(),
        "steps_per_bin": overview.steps_per_bin,
        "rows_per_line": overview.rows_per_line,
        "length": len(timeline),
        "last_step": timeline.columns[-1].step,
        "num_rows": len(timeline.rows),  # those forgotten too
    }


FIGURE = BatchTimeline()
