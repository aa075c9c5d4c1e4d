"""The marks of a timeline's rows as SVG: what a step did for a sequence, by form."""

from __future__ import annotations

from refimpl.visualizers.figure import rect
from refimpl.visualizers.palette import Palette, mix

PALE = 0.34
"""Opacity of what comes after the playhead."""


def hatching(name: str, colour: str, ground: str) -> str:
    """A pattern of diagonal lines."""
    lines = rect(0, 0, 4, 4, ground) + f'<path d="M-1 1l2 -2M0 4l4 -4M3 5l2 -2" stroke="{colour}" stroke-width="0.9"/>'
    return f'<defs><pattern id="{name}" width="4" height="4" patternUnits="userSpaceOnUse">{lines}</pattern></defs>'


def ended(reason: str, x: float, y: float, height: float, colour: str) -> str:
    """The end of a sequence: a bar, and a ring, a cross if it was aborted, a dot if it failed."""
    bar, cx, cy = rect(x - 1, y - 1, 1.5, height + 2, colour), x + 4, y + height / 2
    if reason == "abort":
        return f'{bar}<path d="M{cx - 2:g} {cy - 2:g}l4 4m0 -4l-4 4" stroke="{colour}" stroke-width="1.2" fill="none"/>'
    fill = colour if reason == "error" else "none"
    return f'{bar}<circle cx="{cx:g}" cy="{cy:g}" r="2" stroke="{colour}" stroke-width="1.2" fill="{fill}"/>'


def triangle(x: float, y: float, size: float, colour: str) -> str:
    """A preemption."""
    return f'<path d="M{x - size:.1f} {y - size * 0.6:.1f}h{2 * size:.1f}l{-size:.1f} {size * 1.8:.1f}z" fill="{colour}"/>'


def cells(
    state: str, share: float, x: float, y: float, width: float, count: int, height: float, colours: tuple[str, Palette]
) -> str:
    """``count`` steps of a row that do the same; ``share`` is the height of a decode."""
    own, palette = colours
    middle, whole = y + height / 2, width * count
    if state in ("waiting", "idle"):
        return rect(x, middle - 0.5, whole, 1, palette["ink3"])
    if state == "queued":
        dots = f'stroke="{palette["signal"]}" stroke-dasharray="2 2"'
        return f'<path d="M{x:.1f} {middle:g}h{whole:.1f}" {dots}/>'
    if state == "swapped":
        return rect(x, y + height * 0.22, whole, 1.5, own) + rect(x, y + height * 0.7, whole, 1.5, own)
    if state == "padding":
        return rect(x, y + height / 4, whole, height * 0.75, "url(#refimpl-hatch)")
    if state not in ("decode", "prefill"):
        return ""
    tall = height if state == "prefill" else max(1, height * share)
    fill = own if state == "prefill" else mix(own, palette["bg"], 0.36)
    gap = 0 if width <= 4 else 0.5 if state == "prefill" else 1
    dashes = f' stroke-dasharray="{width - gap:.2f} {gap}"' if gap else ""
    line = f"M{x:.1f} {y + height - tall / 2:.1f}h{whole:.1f}"
    return f'<path d="{line}" stroke="{fill}" stroke-width="{tall:g}"{dashes}/>'
