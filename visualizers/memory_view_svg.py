"""The drawing of MemoryView without a browser: the same layout as static/memory_view.js."""

from __future__ import annotations

from typing import Any

from refimpl.visualizers.figure import WIDTH, Picture, document, plain, rect, text
from refimpl.visualizers.palette import Palette, hue, mix, on

ALL_H, BAR_H = 24, 36
Y = 76
"""Of the first of the two bars, below that of everything."""
CHAR = 6.6
"""Pixels of a character of 11 px, about."""


def draw(picture: Picture, palette: Palette) -> str:
    """The bar of everything, where its bytes are known; the pool twice; the key."""
    body, y = "", 0.0
    if picture["memory"]:
        body += _everything(picture["memory"], palette)
        y = Y
    hatches: dict[str, str] = {}
    for bar in picture["bars"]:
        body += text(0, y + 14, bar["title"], palette["ink"], size=12, weight=600)
        numbers, left = " · ".join(bar["numbers"]), 8 * len(bar["title"]) + 8
        if left + 6 * (len(bar["note"]) + len(numbers)) + 24 < WIDTH:
            body += text(left, y + 14, bar["note"], palette["ink3"])
        body += text(WIDTH, y + 14, numbers, palette["ink2"], anchor="end")
        body += _bar(picture, bar, y + 26, palette, hatches)
        y += 70
    body += _key(y + 8, palette, hatches) + text(WIDTH, y + 8, picture["scale"], palette["ink2"], anchor="end")
    return document(WIDTH, y + 20, f"<defs>{''.join(hatches.values())}</defs>{body}", plain(picture["caption"]))


def _everything(memory: dict[str, Any], palette: Palette) -> str:
    total = memory["total_bytes"]
    weights = WIDTH * memory["weight_bytes"] / total
    first, second = memory["labels"]
    fits = CHAR * len(first) + 16 < weights and CHAR * len(second) + 16 < WIDTH - weights
    title = memory["title"] + ("" if fits else f": {first}, {second}")
    parts = [
        text(0, 6, title, palette["ink"], weight=600),
        rect(0, 16, weights, ALL_H, palette["cached"]),
        rect(weights, 16, max(2, WIDTH - weights), ALL_H, palette["solid"]),
    ]
    if fits:
        parts.append(text(8, 28, first, palette["ink"]))
        parts.append(text(weights + 8, 28, second, on(palette["solid"])))
    path = f"M{min(weights, WIDTH - 2):g} {16 + ALL_H}L0 {Y - 8}M{WIDTH} {16 + ALL_H}V{Y - 8}"
    parts.append(f'<path d="{path}" stroke="{palette["ink3"]}" fill="none"/>')
    return "".join(parts)


def _bar(picture: Picture, bar: dict[str, Any], y: float, palette: Palette, hatches: dict[str, str]) -> str:
    scale = WIDTH / picture["slots"]
    x = picture["null"] * scale
    parts = [rect(0, y, WIDTH, BAR_H, palette["free"]), rect(0, y, max(1, x - 0.6), BAR_H, palette["ink3"])]
    for letter, _, shown, filled, held, owners in bar["holders"]:
        hues = shown if isinstance(shown, list) else [shown]
        solid = hue(palette, hues[0]) if len(hues) == 1 else _stripes([hue(palette, h) for h in hues], hatches)
        parts.append(rect(x, y, max(0.5, filled * scale - (0.6 if filled == held else 0)), BAR_H, solid))
        if (held - filled) * scale >= 0.6:
            line = hue(palette, hues[0])
            hatch = _hatch(line, mix(line, palette["bg"], 0.85), hatches)
            parts.append(rect(x + filled * scale, y, (held - filled) * scale - 0.6, BAR_H, hatch))
        label = f"×{owners} {filled:,}" if owners > 1 else f"{letter} {filled:,}"
        label = label if len(label) * CHAR + 10 < filled * scale else letter if owners == 1 else ""
        if label and len(label) * CHAR + 8 < filled * scale:
            if len(hues) > 1:
                parts.append(rect(x + 4, y + BAR_H / 2 - 8, len(label) * CHAR + 6, 16, palette["bg"]))
            colour = palette["ink"] if len(hues) > 1 else on(hue(palette, hues[0]))
            parts.append(text(x + 6, y + BAR_H / 2, label, colour, weight=600))
        x += held * scale
    for kind, slots, label in bar["rest"]:
        width = slots * scale
        fill = _hatch(palette["ink3"], palette["bg"], hatches) if kind == "stranded" else palette[kind]
        parts.append(rect(x, y, max(0, width - 0.6), BAR_H, fill))
        if kind != "stranded" and len(label) * CHAR + 12 < width:
            colour = palette["ink"] if kind == "cached" else palette["ink2"]
            parts.append(text(x + 6, y + BAR_H / 2, label, colour, weight=600 if kind == "cached" else 400))
        x += width
    return "".join(parts)


def _hatch(line: str, ground: str, hatches: dict[str, str]) -> str:
    """A fill of diagonal lines. It names itself by its colours, so that many pictures in one page do not clash."""
    name = f"hatch{line}{ground}".replace("#", "-")
    hatches[name] = (
        f'<pattern id="{name}" width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        f"{rect(0, 0, 5, 5, ground)}{rect(0, 0, 1.2, 5, line)}</pattern>"
    )
    return f"url(#{name})"


def _stripes(colours: list[str], hatches: dict[str, str]) -> str:
    name = "stripes" + "".join(colours).replace("#", "-")
    bands = "".join(rect(6 * i, 0, 6, 6, colour) for i, colour in enumerate(colours))
    place = f'width="{6 * len(colours)}" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)"'
    hatches[name] = f'<pattern id="{name}" {place}>{bands}</pattern>'
    return f"url(#{name})"


def _key(y: float, palette: Palette, hatches: dict[str, str]) -> str:
    """What the fills mean."""
    entries = [
        (palette["solid"], "holds a token"),
        (_stripes([palette["solid"], palette["tint"]], hatches), "shared, drawn once"),
        (_hatch(palette["ink3"], palette["bg"], hatches), "held, but empty"),
        (palette["cached"], "cached"),
        (palette["free"], "free"),
        (palette["ink3"], "null block"),
    ]
    parts, x = [], 0.0
    for fill, label in entries:
        parts.append(rect(x, y - 6, 14, 12, fill))
        parts.append(text(x + 20, y, label, palette["ink2"]))
        x += 36 + 6.2 * len(label)
    return "".join(parts)
