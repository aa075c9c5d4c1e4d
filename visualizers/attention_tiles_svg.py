"""AttentionView drawn: the grid of scores with the blocks above it, and the running state beside it.

It is drawn once, here, for the browser too: there the palette's colours are those of the page's theme.
"""

from __future__ import annotations

from typing import NamedTuple

from refimpl.visualizers.figure import WIDTH, Picture, document, plain, rect, text
from refimpl.visualizers.palette import MONO, Palette, hue
from refimpl.visualizers.timeline_marks import hatching
from refimpl.visualizers.words import letters

LEFT, TOP, GAP, LINE = 108, 46, 36, 20
MOST_WIDE, MOST_TALL = 560, 340
"""Pixels of the grid."""
COLUMN = 58
MASKED, SKIPPED, LATER = -1, -2, -3
"""In a picture's grid, in place of a weight: computed and hidden, never computed, and not computed yet."""
MASKED_FILL = "refimpl-masked"
LEGEND = (("a score that counts", 70), ("computed, then masked", MASKED), ("never computed", SKIPPED), ("not yet", LATER))


class Cell(NamedTuple):
    """Pixels of a score's square."""

    wide: int
    tall: int


def draw(picture: Picture, palette: Palette) -> str:
    """The whole picture as one SVG element."""
    grid = picture["grid"]
    cell = Cell(max(4, min(24, MOST_WIDE // len(grid[0]))), max(4, min(24, MOST_TALL // len(grid))))
    right, bottom = LEFT + cell.wide * len(grid[0]), TOP + cell.tall * len(grid)
    state, height = _state(picture, right + GAP, palette)
    body = hatching(MASKED_FILL, palette["ink3"], palette["bg"])
    body += _blocks(picture, cell, palette) + _cells(picture, cell, palette) + _edges(picture, cell, palette)
    body += _walks(picture, cell, palette) + state + _legend(bottom + 40, palette)
    return document(WIDTH, max(bottom + 56, height), body, plain(picture["caption"]))


def _cells(picture: Picture, cell: Cell, palette: Palette) -> str:
    """A square a score, and the rows' names."""
    hues = [[8] * len(row) for row in picture["grid"]]
    for first_row, end_row, first_key, _, own in picture["walks"]:
        for row in range(first_row, end_row):
            hues[row][first_key:] = [own] * len(hues[row][first_key:])
    parts = []
    for row, (name, cells) in enumerate(zip(picture["rows"], picture["grid"], strict=True)):
        y = TOP + row * cell.tall
        if cell.tall >= 10:
            parts.append(text(LEFT - 10, y + cell.tall / 2, name, palette["ink2"], anchor="end"))
        for key, weight in enumerate(cells):
            x = LEFT + key * cell.wide
            shape, told = _cell(weight, x, y, cell, hue(palette, hues[row][key]), palette)
            beyond = " (no key is there)" if key >= picture["context"] else ""
            parts.append(f"<g>{shape}<title>{name}, key {key}: {told}{beyond}</title></g>")
    return "".join(parts)


def _cell(weight: int, x: float, y: float, cell: Cell, own: str, palette: Palette) -> tuple[str, str]:
    """One square, and what it says in words."""
    if weight >= 0:
        faded = f'fill-opacity="{0.12 + 0.88 * weight / 100:.2f}"'
        return rect(
            x + 0.5, y + 0.5, cell.wide - 1, cell.tall - 1, own, faded
        ), f"{weight}% of the row's largest weight so far"
    if weight == MASKED:
        return rect(x + 0.5, y + 0.5, cell.wide - 1, cell.tall - 1, f"url(#{MASKED_FILL})"), "computed and masked"
    if weight == SKIPPED:
        return rect(x + cell.wide / 2 - 1, y + cell.tall / 2 - 1, 2, 2, palette["cached"]), "never computed"
    line = f'stroke="{palette["rule"]}"'
    return rect(x + 1, y + 1, cell.wide - 2, cell.tall - 2, palette["bg"], line), "not computed yet"


def _blocks(picture: Picture, cell: Cell, palette: Palette) -> str:
    """The block table over the columns: which block holds each key."""
    size = picture["block_size"]
    parts = [text(LEFT - 10, TOP - 14, "block", palette["ink2"], anchor="end")]
    for index, block_id in enumerate(picture["block_table"]):
        x, wide = LEFT + index * size * cell.wide, size * cell.wide
        parts.append(rect(x + 1, TOP - 24, wide - 2, 18, palette["free"]))
        if wide >= 14:
            parts.append(text(x + wide / 2, TOP - 15, str(block_id), palette["ink"], anchor="middle"))
    columns = len(picture["grid"][0])
    numbered = [*range(0, max(1, columns - 3), 8), *([columns - 1] if columns > 1 else [])]
    parts += [
        text(LEFT + (key + 0.5) * cell.wide, TOP - 34, str(key), palette["ink3"], size=10, anchor="middle")
        for key in numbered
    ]
    parts.append(text(LEFT - 10, TOP - 34, "key", palette["ink3"], size=10, anchor="end"))
    return "".join(parts)


def _edges(picture: Picture, cell: Cell, palette: Palette) -> str:
    """The end of the context, and the tile at hand."""
    rows = len(picture["grid"])
    x = LEFT + picture["context"] * cell.wide
    parts = []
    if picture["context"] < len(picture["grid"][0]):
        parts.append(rect(x - 0.75, TOP - 4, 1.5, rows * cell.tall + 8, palette["ink"]))
    if picture["now"] is not None:
        first_row, end_row, first_key, end_key = picture["now"]
        more = f'stroke="{palette["signal"]}" stroke-width="2.5"'
        x, y = LEFT + first_key * cell.wide, TOP + first_row * cell.tall
        parts.append(rect(x, y, (end_key - first_key) * cell.wide, (end_row - first_row) * cell.tall, "none", more))
    return "".join(parts)


def _walks(picture: Picture, cell: Cell, palette: Palette) -> str:
    """The walks' letters: beside their rows, or under their keys where several have the same rows."""
    parts, walks = [], picture["walks"]
    side_by_side = len({first_key for _, _, first_key, _, _ in walks}) > 1
    for number, (first_row, end_row, first_key, end_key, own) in enumerate(walks):
        if side_by_side:
            x, y = LEFT + (first_key + end_key) / 2 * cell.wide, TOP + cell.tall * len(picture["grid"]) + 12
        else:
            x, y = 12, TOP + (first_row + end_row) / 2 * cell.tall
        if first_row == 0 or not side_by_side:
            parts.append(rect(x - 11, y - 4.5, 9, 9, hue(palette, own)) + text(x + 2, y, letters(number), palette["ink"]))
    return "".join(parts)


def _state(picture: Picture, x: float, palette: Palette) -> tuple[str, float]:
    """The table of the state at x, and its height."""
    state = picture["state"]
    columns = [x + 92 + COLUMN * index for index in range(len(state["head"]) - 1)]
    fitting = [right for right in columns if right + COLUMN <= WIDTH]
    parts = [text(x, 12, state["title"], palette["ink"], size=12, weight=620)]
    if state["hue"] is not None:
        parts.append(rect(x - 14, 7, 9, 9, hue(palette, state["hue"])))
    for right, name in zip(fitting, state["head"][1:], strict=False):
        parts.append(text(right + COLUMN - 10, TOP - 14, name, palette["ink3"], anchor="end"))
    for index, (cells, strong) in enumerate(zip(state["rows"], state["strong"], strict=True)):
        y = TOP + LINE * index + LINE / 2
        parts.append(rect(x, y - LINE / 2, (fitting or [x])[-1] + COLUMN - 10 - x, 1, palette["faint"]))
        parts.append(text(x, y, cells[0], palette["ink2"]))
        for column, (right, value) in enumerate(zip(fitting, cells[1:], strict=False)):
            colour = palette["signal"] if strong and column == 1 else palette["ink"]
            shown = text(right + COLUMN - 10, y, value, colour, size=12, anchor="end")
            parts.append(shown.replace("<text ", f"<text font-family='{MONO}' ", 1))
    bottom = TOP + LINE * len(state["rows"])
    left_out = []
    if len(fitting) < len(columns):
        left_out.append(f"{len(columns) - len(fitting)} columns")
    if state["not_shown"]:
        left_out.append(f"{state['not_shown']} rows")
    if left_out:
        parts.append(text(x, bottom + 14, f"{' and '.join(left_out)} more", palette["ink3"]))
    return "".join(parts), bottom + 28


def _legend(y: float, palette: Palette) -> str:
    """What the squares mean."""
    parts, x = [], float(LEFT)
    for words, weight in LEGEND:
        parts.append(_cell(weight, x, y - 6, Cell(12, 12), palette["h0"], palette)[0])
        parts.append(text(x + 18, y, words, palette["ink2"]))
        x += 30 + 6.2 * len(words)
    return "".join(parts)
