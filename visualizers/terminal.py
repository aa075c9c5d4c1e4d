"""The terminal's form of the live pictures: block map, timeline, and the scheduler's reasons, in letters.

::

      0 │∅666AAAAABBBBBBBB    steps 16 to 51
     17 │BBBBBJJJJJJJjl3hK    E ▆▆▄▇▁▂▼═════════════════════════════
     34 │KKKKKKKKKjJABlJHH    I    ────█▄▂▂▁▇▁▂▄▂▇▁▇▁▼┄█▂▁▁▁▄▂▂▇▁▂▁▂╂
     51 │AJJHBl░HJBB░JA░░J    J       ───────────────────────────██▄▁

A block is its sequence's letter (of ``AB``, the last one; of ``L·1``, the L), in lower case while it is part-filled; a digit
is the number of owners of a shared block. Letters suffice: colour only says the same again.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections import Counter
from collections.abc import Callable

import numpy as np

from refimpl.visualizers.figure import count
from refimpl.visualizers.frames import why
from refimpl.visualizers.history import History
from refimpl.visualizers.palette import DARK, LIGHT, Palette, on
from refimpl.visualizers.sequence_state import NEUTRAL, SequenceState
from refimpl.visualizers.speculation_fold import SpeculationFold
from refimpl.visualizers.state import State
from refimpl.visualizers.timeline_rows import Timeline
from refimpl.visualizers.timeline_runs import DECODE, FOLLOWS, IDLE, PADDING, PREFILL, QUEUED, SWAPPED, WAITING, Row
from refimpl.visualizers.words import percent

FREE, CACHED, NULL, MANY_OWNERS = "·", "░", "∅", "+"
DECODES = "▁▂▄▆▇"
"""By tokens drawn in the step, 1 to 5 and more."""
GLYPHS = {WAITING: "─", FOLLOWS: "─", IDLE: "─", PREFILL: "█", QUEUED: "┄", SWAPPED: "═", PADDING: " "}
PREEMPTION, END = "▼", "╂"
LEGEND = (
    *(f"{FREE} free", f"{CACHED} cached", f"{NULL} null", "2 owners", "a part-filled", "─ waiting", "█ prefill"),
    *(f"{DECODES} decode", f"{PREEMPTION} preempted", "═ swapped", "┄ queued again", f"{END} finished"),
)
LEAST_MAP, LEAST_TIMELINE = 16, 24
"""Characters."""

Cell = tuple[str, str]
"""A character, and a key of the palette for its colour: ``h3``, or ``ink3``; a block's hue colours its ground."""


def render(
    history: History, position: int, width: int | None = None, colour: bool | None = None, height: int | None = None
) -> str:
    """The picture after the record at ``position``, as lines of text.

    Args:
        history: the records.
        position: which of them; -1 is before the first.
        width: of the terminal in characters; its own by default.
        colour: 24-bit colours. By default where standard output is a terminal and NO_COLOR is not set.
        height: of the terminal in lines; its own by default. What does not fit is condensed, and counted in words.

    """
    if width is None or height is None:
        from rich.console import Console

        size = Console().size
        width, height = width or size.width, height or size.height
    if colour is None:
        colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    palette = _palette() if colour else None
    width, state = max(width, LEAST_MAP + 8), history.state_at(position)
    reasons = _reasons(history, position, width)
    legend = [_plain(line, "ink3", palette) for line in _legend(width)] if height >= 16 else []
    room = max(3, height - 2 - len(reasons) - len(legend))
    beside = width >= LEAST_MAP + 10 + LEAST_TIMELINE
    left = _block_map(state, (width // 2 if beside else width) - 10, room, palette)
    if beside:
        used = left[0][1] + 4
        right = _timeline(history, position, width - used, room, palette)
        body = [_beside(left, right, row, used) for row in range(max(len(left), len(right)))]
    else:
        body = [line for line, _ in left]
    return "\n".join([_header(history, position, state, width), *body, *legend, *reasons])


def _palette() -> Palette:
    """Dark, unless the terminal says that its ground is light."""
    return LIGHT if os.environ.get("COLORFGBG", "").endswith((";7", ";15")) else DARK


def _header(history: History, position: int, state: State, width: int) -> str:
    """Step, blocks, sequences: the short form where the long one is too wide."""
    if state.record is None:
        return f"no step yet · all {count(state.num_blocks, 'block')} free"[:width]
    counts, record = state.counts(), state.record
    used = counts["owned"] + counts["shared"]
    running = sum(sequence.phase == "running" for sequence in state.alive())
    waiting = sum(sequence.phase in ("waiting", "preempted", "swapped") for sequence in state.alive())
    swap = f", {state.swapped.num_used:,} of {state.num_host_blocks:,} in swap" if state.num_host_blocks else ""
    long = (
        f"step {record.step:,} of {history.records[-1].step:,} · {record.updated_at:,.3f} s · "
        f"{used:,} of {state.num_blocks:,} blocks used, {counts['cached']:,} cached, {counts['free']:,} free{swap} · "
        f"{running:,} running, {waiting:,} waiting"
    )
    if history.config.get("num_speculative_tokens"):
        long += f" · {_drafts(history, position)}"
    if history.first:
        long += f" · the first {history.first:,} are not kept"
    if state.truncated:
        long += " · what ran before this log began is not known"
    short = f"step {record.step:,} · {used:,}/{state.num_blocks:,} blocks · {running:,} running, {waiting:,} waiting"
    return long if len(long) <= width else short[:width]


def _drafts(history: History, position: int) -> str:
    """``48% of 120 drafts accepted, 2.54 tokens a round``."""
    seen = history.fold(SpeculationFold).outcomes(position).with_drafts()
    if not seen.num_rounds:
        return "no drafts yet"
    share = f"{percent(seen.num_accepted, seen.num_drafts)} of {count(seen.num_drafts, 'draft')} accepted"
    return f"{share}, {seen.num_tokens / seen.num_rounds:.2f} tokens a round"


def _reasons(history: History, position: int, width: int) -> list[str]:
    """The "Why?" line, a reason a line."""
    told = [f"{who} {what}" if who else what for who, what in why(history, position)]
    return [("Why? " if index == 0 else "     ") + reason[: width - 5] for index, reason in enumerate(told)]


def _legend(width: int) -> list[str]:
    """What the letters mean, in one or two lines."""
    lines = [""]
    for piece in LEGEND:
        if len(lines[-1]) + len(piece) > width:
            lines.append("")
        lines[-1] += f"{piece}  "
    return [line.rstrip() for line in lines] if len(lines) <= 2 else []


# ---------------------------------------------------------------------- blocks


def _block_map(state: State, columns: int, room: int, palette: Palette | None) -> list[tuple[str, int]]:
    """(line, its visible width): block ids at the left, then cells."""
    cells = _cells(state)
    columns = max(LEAST_MAP, min(columns, max(LEAST_MAP, -(-len(cells) // room))))
    a_cell = -(-len(cells) // (columns * room))
    if a_cell > 1:  # a line less, for the words
        a_cell = -(-len(cells) // (columns * (room - 1)))
    shown = cells if a_cell == 1 else [_together(cells[i : i + a_cell]) for i in range(0, len(cells), a_cell)]
    gutter = len(f"{len(cells) - 1}")
    lines = []
    for first in range(0, len(shown), columns):
        row = shown[first : first + columns]
        text = _coloured(row, palette, _ground)
        lines.append((f"{first * a_cell:>{gutter}} │{text}{' ' * (columns - len(row))}", gutter + 2 + columns))
    if a_cell > 1:
        said = f"a cell stands for {a_cell:,} blocks"[: gutter + 2 + columns]
        lines.append((said.ljust(gutter + 2 + columns), gutter + 2 + columns))
    return lines


def _together(cells: list[Cell]) -> Cell:
    """Neighbouring blocks as one: whoever has most of those in use, in lower case unless all are; else cached, if any is."""
    in_use = [cell for cell in cells if cell[1] != "ink3"]
    if not in_use:
        return next((cell for cell in cells if cell[0] == CACHED), cells[-1])
    glyph, key = Counter(in_use).most_common(1)[0][0]
    return (glyph if len(in_use) == len(cells) else glyph.lower()), key


def _cells(state: State) -> list[Cell]:
    """Every block, the null block first. From the tables, which are shorter than the pool: O(blocks in use)."""
    cells: list[Cell] = [(FREE, "ink3")] * (state.num_blocks + 1)
    for block_id in np.flatnonzero(state.blocks.published).tolist():
        cells[block_id] = (CACHED, "ink3")
    for sequence in state.alive():
        upper, lower = ((form, _hue_key(sequence.hue)) for form in _letter(sequence))
        full = sequence.num_computed_tokens // state.block_size
        for index, block_id in state.device_blocks(sequence):
            cells[block_id] = upper if index < full else lower
    for block_id, owners in state.shared_blocks(state.num_blocks):
        hues = {state.sequences[owner].hue for owner in owners}
        key = _hue_key(hues.pop()) if len(hues) == 1 else "tint"
        cells[block_id] = (f"{len(owners)}" if len(owners) < 10 else MANY_OWNERS, key)
    cells[0] = (NULL, "ink3")
    return cells


def _letter(sequence: SequenceState) -> tuple[str, str]:
    letter = sequence.letter.partition("·")[0][-1]
    return letter.upper(), letter.lower()


# ---------------------------------------------------------------------- time


def _timeline(history: History, position: int, width: int, room: int, palette: Palette | None) -> list[str]:
    """A line of words, then a line for each sequence that is there in the window; the last column is for ends."""
    if position < history.first or not history.records:
        return ["no requests yet"]
    position = min(position, len(history) - 1)
    timeline = history.fold(Timeline)
    state = history.state_at(position)
    widest = _rows(timeline, state, position + 4 - width, position)
    label = max(len(row.letter) for row in widest) if widest else 1
    first = max(history.first, position + 1 - (width - label - 2))
    rows = _rows(timeline, state, first, position)
    shown = _choose(rows, position, room - 1)
    lines = [f"steps {history.records[first].step:,} to {history.records[position].step:,}, a column each"[:width]]
    for row in shown:
        known = state.sequences.get(row.sequence_id)
        key = _hue_key(row.hue if known is None else known.hue)  # who waits now may get its hue later
        ends = row.end is not None and row.end[0] <= position + (known is not None and known.ended)
        glyphs = _coloured(_life(row, first, position, key, ends), palette, _plain)
        lines.append(f"{_plain(row.letter.ljust(label), key, palette)} {glyphs}".rstrip())
    if len(shown) < len(rows):
        lines.append(f"and {count(len(rows) - len(shown), 'more sequence')}"[:width])
    return lines


def _rows(timeline: Timeline, state: State, first: int, position: int) -> list[Row]:
    """Who is there at a position, and who came, went or changed since column ``first``."""
    found = {timeline.rows[index] for index in timeline.presence.between(first, position + 2)}
    found |= {timeline.row_of[sequence.sequence_id] for sequence in state.alive() if sequence.sequence_id in timeline.row_of}
    return sorted((row for row in found if row.arrived <= position), key=lambda row: row.index)


def _choose(rows: list[Row], position: int, room: int) -> list[Row]:
    """Those that fit: who runs goes before who waits, and both before who has ended. In order of arrival."""
    if len(rows) <= room:
        return rows

    def rank(row: Row) -> tuple[int, int]:
        state = row.at(position)[0]
        return (0 if state in (PREFILL, DECODE, IDLE) else 1 if state in GLYPHS and state != PADDING else 2), row.index

    return sorted(sorted(rows, key=rank)[: max(0, room - 1)], key=lambda row: row.index)


def _life(row: Row, first: int, position: int, key: str, ends: bool) -> list[Cell]:
    """A glyph for each column of the window, and one more, for an end after the last."""
    life: list[Cell] = [(" ", key)] * (position + 2 - first)
    runs = row.runs(first, position + 1)
    for start, end, state, drawn, _ in zip(*(runs[i::5] for i in range(5)), strict=True):
        glyph = DECODES[min(max(drawn, 1), len(DECODES)) - 1] if state == DECODE else GLYPHS[state]
        own = "ink3" if glyph == "─" else "signal" if state == QUEUED else key
        life[start - first : end - first] = [(glyph, own)] * (end - start)
    for column in row.preemptions:
        if first <= column <= position:
            life[column - first] = (PREEMPTION, "signal")
    if ends and row.end is not None and row.end[0] >= first:
        life[row.end[0] - first] = (END, "ink2")
    while life and life[-1][0] == " ":
        life.pop()
    return life


# ---------------------------------------------------------------------- letters and colours


def _coloured(cells: list[Cell], palette: Palette | None, paint: Callable[[str, str, Palette | None], str]) -> str:
    """Neighbours of one colour are painted together."""
    runs = itertools.groupby(cells, key=lambda cell: cell[1])
    return "".join(paint("".join(glyph for glyph, _ in run), key, palette) for key, run in runs)


def _hue_key(number: int | None) -> str:
    return f"h{NEUTRAL if number is None else number}"


def _plain(text: str, key: str, palette: Palette | None) -> str:
    """Coloured letters."""
    return text if palette is None else f"\x1b[38;2;{_rgb(palette[key])}m{text}\x1b[0m"


def _ground(text: str, key: str, palette: Palette | None) -> str:
    """Letters on a coloured ground, if they are somebody's."""
    if palette is None or key == "ink3":
        return _plain(text, key, palette)
    return f"\x1b[48;2;{_rgb(palette[key])};38;2;{_rgb(on(palette[key]))}m{text}\x1b[0m"


def _rgb(colour: str) -> str:
    return ";".join(str(int(colour[i : i + 2], 16)) for i in (1, 3, 5))


def _beside(left: list[tuple[str, int]], right: list[str], row: int, used: int) -> str:
    line, visible = left[row] if row < len(left) else ("", 0)
    return f"{line}{' ' * (used - visible)}{right[row]}".rstrip() if row < len(right) else line.rstrip()
