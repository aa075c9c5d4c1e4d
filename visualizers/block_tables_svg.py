"""The drawing of BlockTables without a browser: the same layout as static/block_tables.js."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

from refimpl.visualizers.figure import WIDTH, Picture, document, plain, rect, text
from refimpl.visualizers.palette import MONO, Palette, hue, mix, on

PANEL, GAP = 384, 32
TABLE_Y, CELL_H = 62, 20
BLOCK_Y, BLOCK_H = 140, 46
PANEL_H = 222
ELLIPSIS = 14
Table = dict[str, Any]
CHAR = 7.3
"""Pixels of a monospaced character of 12 px, about."""


def draw(picture: Picture, palette: Palette) -> str:
    """The panels side by side, and the tokens of the copied block below."""
    panels = picture["panels"]
    width = PANEL if len(panels) > 1 else WIDTH
    body = ""
    for number, panel in enumerate(panels):
        drawn = _panel(panel, number + 1 if len(panels) > 1 else None, width, palette)
        body += f'<g transform="translate({number * (PANEL + GAP)},0)">{drawn}</g>'
    height = PANEL_H if panels else 24
    if not panels:
        body = text(0, 12, plain(picture["caption"]), palette["ink2"], size=12)
    if picture["tokens"]:
        body += _tokens(picture, height + 14, palette)
        height += 52
    for letter, number, _, words in picture["swapped"]:
        body += text(0, height + 10, letter, hue(palette, number) if letter else palette["ink2"], size=12, weight=650)
        body += text(8 * len(letter) + 8 if letter else 0, height + 10, words, palette["ink2"], size=12)
        height += 20
    return document(WIDTH, height, body, plain(picture["caption"]))


# ---------------------------------------------------------------------- layout


def layout(panel: dict[str, Any], width: float) -> dict[str, Any]:
    """Where tables and blocks stand: as many entries of each table as fit, the last one always."""
    tables, blocks = panel["tables"], {block["id"]: block for block in panel["blocks"]}
    digits = len(str(max(blocks)))
    cell, block_width = max(22, 6.2 * digits + 8), max(34, 7 * digits + 8)
    each = (width - 16 * (len(tables) - 1)) / len(tables)
    targets = [block["id"] for block in panel["blocks"] if block["ring"] == "copy" or block["references"] == 0]
    for capacity in range(max(1, int(each // cell)), 0, -1):
        shown = [_pick(table, capacity, int((each - ELLIPSIS) // cell)) for table in tables]
        wanted = {block_id for entries in shown for _, block_id in entries} | set(targets)
        ids = [block_id for block_id in blocks if block_id in wanted]
        left_out = sum(entry[0] > before[0] + 1 for entries in shown for before, entry in pairwise([[-1, 0], *entries]))
        if (len(ids) + 0.5 * left_out) * block_width <= width:
            break
    widths = [cell * len(entries) + ELLIPSIS * _gaps(table, entries) for table, entries in zip(tables, shown, strict=True)]
    between = min(96, (width - sum(widths)) / max(1, len(tables) - 1))
    gaps: dict[int, int] = {}
    for entries in shown:
        for before, entry in pairwise([[-1, 0], *entries]):
            gaps.setdefault(entry[1], 0 if blocks[entry[1]]["ring"] == "copy" else entry[0] - before[0] - 1)
    units = list(accumulate(0.5 * (gaps.get(block_id, 0) > 0) + (number > 0) for number, block_id in enumerate(ids)))
    wide = min(56, (width + 6) / (units[-1] + 1) - 6)
    pitch = min(96, (width - wide) / max(1, units[-1]))
    places, x = [], 0.0
    for table, entries, total in zip(tables, shown, widths, strict=True):
        places.append((table, x, _cells(entries, x, cell)))
        x += total + between
    positions = {block_id: unit * pitch for block_id, unit in zip(ids, units, strict=True)}
    return {"cell": cell, "block": wide, "tables": places, "blocks": positions, "gaps": gaps, "space": 1.5 * pitch - wide}


def _pick(table: Table, capacity: int, with_ellipsis: int) -> list[list[int]]:
    """The entries to draw: all, or the first and the last."""
    entries: list[list[int]] = table["entries"]
    if len(entries) <= capacity and table["length"] == len(entries):
        return entries
    return [*entries[: max(0, min(capacity, with_ellipsis) - 1)][: len(entries) - 1], entries[-1]]


def _gaps(table: Table, entries: list[list[int]]) -> int:
    """Ellipses that stand for what is left out."""
    jumps = sum(b[0] > a[0] + 1 for a, b in pairwise([[-1, 0], *entries]))
    return jumps + int(entries[-1][0] < table["length"] - 1)


def _cells(entries: list[list[int]], x: float, cell: float) -> list[tuple[int, int, float]]:
    """(index, block id, x) of each entry."""
    cells, before = [], -1
    for index, block_id in entries:
        x += ELLIPSIS if index > before + 1 else 0
        cells.append((index, block_id, x))
        x, before = x + cell, index
    return cells


# ---------------------------------------------------------------------- drawing


def _panel(panel: dict[str, Any], number: int | None, width: float, palette: Palette) -> str:
    place = layout(panel, width)
    lead = "" if number is None else f"{number}  "
    parts = [
        text(0, 8, lead + panel["title"], palette["ink"], size=12, weight=600),
        text(14 if number else 0, 26, panel["note"], palette["ink2"], size=12),
    ]
    curves = []
    for row, (table, x, cells) in enumerate(place["tables"]):
        parts.append(text(x, TABLE_Y - 10, table["letter"], palette["ink"], weight=600))
        parts.extend(_ellipses(table, cells, x, place["cell"], palette))
        for index, block_id, cell_x in cells:
            parts.append(_cell(table, index, block_id, cell_x, place["cell"], palette))
            curves.append(_curve(panel, place, row, index, block_id, cell_x, palette))
    curves.sort(key=lambda curve: curve[0])  # strong ones on top
    shown = [(block, place["blocks"][block["id"]]) for block in panel["blocks"] if block["id"] in place["blocks"]]
    parts.extend(_block(block, panel["block_size"], x, place["block"], palette) for block, x in shown)
    for block, x in shown:
        if left_out := place["gaps"].get(block["id"]):
            middle = x / 2 if block is shown[0][0] else x - place["space"] / 2
            parts.append(text(middle, BLOCK_Y + BLOCK_H / 2, "…", palette["ink3"], anchor="middle"))
            parts.append(text(middle, BLOCK_Y + BLOCK_H + 12, f"+{left_out}", palette["ink3"], anchor="middle"))
    if panel["blocks"][-1]["label"] == "copying":
        a, b = (x for _, x in shown[-2:])
        y = BLOCK_Y + BLOCK_H / 2 + 6
        parts.append(f'<path d="M{a + place["block"]:g} {y:g}H{b - 5:g}" stroke="{palette["signal"]}" stroke-width="2"/>')
        parts.append(f'<path d="M{b:g} {y:g}l-8 -4v8z" fill="{palette["signal"]}"/>')
    return "".join(curve for _, curve in curves) + "".join(parts)


def _cell(table: Table, index: int, block_id: int, x: float, width: float, palette: Palette) -> str:
    hot = index == table["hot"]
    fill, stroke = (palette["signal"], palette["signal"]) if hot else (palette["bg"], palette["ink3"])
    colour = on(palette["signal"]) if hot else palette["ink"]
    box = rect(x + 0.5, TABLE_Y + 0.5, width - 1, CELL_H - 1, fill, f'stroke="{stroke}"')
    return box + text(x + width / 2, TABLE_Y + CELL_H / 2, str(block_id), colour, size=10, anchor="middle")


def _ellipses(table: Table, cells: list[tuple[int, int, float]], x: float, cell: float, palette: Palette) -> list[str]:
    before, parts = -1, []
    for index, _, cell_x in cells:
        if index > before + 1:
            parts.append(text(cell_x - ELLIPSIS / 2, TABLE_Y + CELL_H / 2, "…", palette["ink3"], anchor="middle"))
        before, x = index, cell_x + cell
    if before < table["length"] - 1:
        parts.append(text(x + ELLIPSIS / 2, TABLE_Y + CELL_H / 2, "…", palette["ink3"], anchor="middle"))
    return parts


def _curve(
    panel: dict[str, Any], place: dict[str, Any], row: int, index: int, block_id: int, x: float, palette: Palette
) -> tuple[int, str]:
    """From an entry to its block; (how strong, the path)."""
    table = panel["tables"][row]
    block = next(block for block in panel["blocks"] if block["id"] == block_id)
    strong = index == panel["strong"] if panel["strong"] is not None else block["references"] > 1
    colour = hue(palette, table["hue"]) if strong else palette["cached"]
    if index == table["hot"] and block["ring"] == "copy":
        colour = palette["signal"]
    count = len(panel["tables"])
    to = place["blocks"][block_id] + place["block"] / 2 + (row - (count - 1) / 2) * min(9, place["block"] / (count + 1))
    x, y, mid = x + place["cell"] / 2, TABLE_Y + CELL_H, (TABLE_Y + CELL_H + BLOCK_Y) / 2
    path = f"M{x:g} {y}C{x:g} {mid + 6:g} {to:g} {mid - 6:g} {to:g} {BLOCK_Y - 5}"
    return int(strong), (
        f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="{1.6 if strong else 1}"/>'
        f'<path d="M{to:g} {BLOCK_Y - 1}l-3 -5h6z" fill="{colour}"/>'
    )


def _block(block: dict[str, Any], size: int, x: float, width: float, palette: Palette) -> str:
    colours = [hue(palette, number) for number in block["hues"]] or [palette["free"]]
    copying = block["label"] == "copying"
    colours = [mix(colour, palette["bg"], 0.35) for colour in colours] if copying else colours
    level = BLOCK_H * block["fill"] / size if block["hues"] else 0
    ground = mix(colours[0], palette["bg"], 0.8) if block["hues"] else palette["free"]
    pattern, paint = _stripes(colours)
    parts = [pattern, rect(x, BLOCK_Y, width, BLOCK_H, ground), rect(x, BLOCK_Y + BLOCK_H - level, width, level, paint)]
    if block["ring"]:
        dash = 'stroke-dasharray="4 3"' if block["ring"] == "source" else ""
        parts.append(rect(x + 1, BLOCK_Y + 1, width - 2, BLOCK_H - 2, "none", f'stroke="{palette["bg"]}" stroke-width="5"'))
        parts.append(rect(x, BLOCK_Y, width, BLOCK_H, "none", f'stroke="{palette["signal"]}" stroke-width="2" {dash}'))
    if block["fill"] and block["hues"]:
        y = BLOCK_Y + BLOCK_H - (level / 2 if level >= 14 else level + 8)
        inside = on(colours[0]) if level >= 14 and len(colours) == 1 else palette["ink"]
        if len(colours) > 1:
            parts.append(rect(x + width / 2 - 10, y - 7, 20, 14, palette["bg"]))
        parts.append(text(x + width / 2, y, str(block["fill"]), inside, weight=600, anchor="middle"))
    middle = x + width / 2
    parts.append(text(middle, BLOCK_Y + BLOCK_H + 12, str(block["id"]), palette["ink"], weight=600, anchor="middle"))
    label = palette["signal"] if copying else palette["ink2"]
    parts.append(text(middle, BLOCK_Y + BLOCK_H + 26, block["label"], label, anchor="middle"))
    return "".join(parts)


def _stripes(colours: list[str]) -> tuple[str, str]:
    """The fill of a block of several requests: a pattern, which names itself by its colours, and what refers to it."""
    if len(colours) == 1:
        return "", colours[0]
    name = "stripes" + "".join(colours).replace("#", "-")
    bands = "".join(rect(6 * i, 0, 6, 6, colour) for i, colour in enumerate(colours))
    size = f'width="{6 * len(colours)}" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)"'
    return f'<pattern id="{name}" {size}>{bands}</pattern>', f"url(#{name})"


def _tokens(picture: Picture, y: float, palette: Palette) -> str:
    """The copied block's tokens, underlined one by one, and what each owner puts next to them."""
    parts = [text(0, y, f"block {picture['source']} holds", palette["ink2"], size=12)]
    x, room = 104.0, WIDTH - 40
    for token in (["…"] if picture["tokens_before"] else []) + picture["tokens"]:
        wide = CHAR * len(token)
        if x + wide > room:
            parts.append(text(x, y, "…", palette["ink2"], size=12))
            break
        parts.append(_token(x, y, token, palette["ink"], palette["ink3"]))
        x += wide + 4
    parts.append(text(0, y + 24, f"into slot {picture['slot']} goes", palette["ink2"], size=12))
    x = 104
    for entry in picture["next"]:
        parts.append(text(x, y + 24, entry["letter"], palette["ink"], size=12, weight=600))
        x += 8 * len(entry["letter"]) + 8
        line = palette["signal"] if entry["writes"] else hue(palette, entry["hue"])
        parts.append(_token(x, y + 24, entry["text"], palette["ink"], line))
        x += CHAR * len(entry["text"]) + 24
    return "".join(parts)


def _token(x: float, y: float, token: str, colour: str, line: str) -> str:
    shown = text(x, y, token.replace(" ", "\N{NO-BREAK SPACE}"), colour, size=12)
    shown = shown.replace("<text ", f"<text font-family='{MONO}' ", 1)
    return shown + rect(x, y + 9, CHAR * len(token), 1.5, line)
