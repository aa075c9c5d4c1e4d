"""The colours of every picture. Hue says who, form says what, and one signal colour says "now".

The eight hues, the signal and the grey of cached blocks can be told apart in normal vision, protanopia, deuteranopia and
tritanopia (a test holds the least distance). Hue never stands alone: a letter, a label or a row says the same.
"""

from __future__ import annotations

from refimpl.visualizers.sequence_state import NEUTRAL

FONT = 'Inter, "Segoe UI", system-ui, -apple-system, "Helvetica Neue", Arial, sans-serif'
MONO = 'ui-monospace, SFMono-Regular, "JetBrains Mono", Menlo, Consolas, monospace'

_HUES_LIGHT = ["#2c42a2", "#dfb121", "#2c8164", "#c1749f", "#74aae4", "#6c442a", "#9c53ba", "#a29f47", "#3b424b"]
_HUES_DARK = ["#4563c7", "#f9d87c", "#319691", "#f699b2", "#87c7fc", "#845a29", "#9d79d0", "#cdc03b", "#d3d8de"]

Palette = dict[str, str]

LIGHT: Palette = {
    "bg": "#ffffff",
    "ink": "#1b1f24",
    "ink2": "#59616b",
    "ink3": "#6f7780",
    "rule": "#dfe3e7",
    "faint": "#f1f3f5",
    "cached": "#c9ced3",
    "free": "#eef0f2",
    "signal": "#dc3018",
    "solid": "#3b424b",
    "tint": "#b3bac2",
} | {f"h{i}": colour for i, colour in enumerate(_HUES_LIGHT)}

DARK: Palette = {
    "bg": "#111418",
    "ink": "#e8eaed",
    "ink2": "#a3abb4",
    "ink3": "#848c95",
    "rule": "#2b3036",
    "faint": "#1a1e23",
    "cached": "#484f57",
    "free": "#1d2126",
    "signal": "#ff6a4d",
    "solid": "#d3d8de",
    "tint": "#68707a",
} | {f"h{i}": colour for i, colour in enumerate(_HUES_DARK)}


def hue(palette: Palette, number: int | None) -> str:
    """The colour of a request's hue; of one without, the neutral one."""
    return palette[f"h{NEUTRAL if number is None else number}"]


def mix(a: str, b: str, share: float) -> str:
    """``a`` with a share of ``b``, both ``#rrggbb``."""
    parts = (round(x * (1 - share) + y * share) for x, y in zip(_rgb(a), _rgb(b), strict=True))
    return "#" + "".join(f"{part:02x}" for part in parts)


def luminance(colour: str) -> float:
    """Relative luminance by WCAG 2, 0 to 1."""
    red, green, blue = (v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in (c / 255 for c in _rgb(colour)))
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def on(colour: str) -> str:
    """White or near-black, whichever contrasts more on a colour."""
    light = luminance(colour) + 0.05
    return "#ffffff" if 1.05 / light > light / 0.0525 else "#111418"


def _rgb(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)
