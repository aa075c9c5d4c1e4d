"""What a figure is: a question, and a picture that answers it. The browser draws pictures; Python decides what is in them.

A picture is a pure function of a history, a position in it, and the view's :class:`Look`. It has a caption, whose bold parts
answer the figure's question with numbers, and whatever the figure's drawing in ``static/NAME.js`` needs. ``svg`` draws the
same picture without a browser: for GitHub, for exports, and where no widget manager runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Protocol

from refimpl.visualizers.history import Fold, History
from refimpl.visualizers.palette import FONT, Palette

Caption = list[tuple[str, bool]]
"""(text, bold) parts."""

Picture = dict[str, Any]
"""JSON-able; has the key ``caption``."""

WIDTH = 1216
"""Pixels of a figure, as wide as a notebook's cell on a laptop; narrower places scale or reflow."""


@dataclass(frozen=True, slots=True)
class Look:
    """How a view looks at a log, beside the position: what a figure leaves out depends on it."""

    width: int = WIDTH
    """Pixels."""
    pinned: str | None = None
    """A request that is to be in sight."""


WHOLE = Look()


class Figure(Protocol):
    """One figure. Modules of this package hold one object each that follows this."""

    name: str
    """snake_case: also the name of ``static/NAME.js``."""
    title: str
    question: str

    @property
    def folds(self) -> Sequence[type[Fold]]:
        """What it reads of a history, beside its records and states."""

    def picture(self, history: History, position: int, look: Look = WHOLE) -> Picture:
        """What to draw after the record at ``position``; -1 is before the first. It holds nothing that changes later."""

    def svg(self, picture: Picture, palette: Palette) -> str:
        """The picture as one ``<svg>`` element of ``WIDTH`` pixels."""


def prepare(history: History, figures: Iterable[Figure]) -> None:
    """Have the records of a history go once through all that these figures read."""
    history.follow(kind for figure in figures for kind in figure.folds)


def count(number: int, what: str) -> str:
    """``1 block``, ``1,234 blocks``."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def duration(seconds: float) -> str:
    """``12 ms``, ``1.20 s``."""
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:,.2f} s"


def plain(caption: Caption) -> str:
    """The caption as text: the alternative of a picture for who cannot see it."""
    return "".join(text for text, _ in caption)


def text(x: float, y: float, content: str, colour: str, *, size: int = 11, weight: int = 400, anchor: str = "start") -> str:
    """An SVG text, its middle at ``y``."""
    return (
        f'<text x="{x:g}" y="{y:g}" fill="{colour}" font-size="{size}" font-weight="{weight}" text-anchor="{anchor}" '
        f'dominant-baseline="central">{escape(content)}</text>'
    )


def rect(x: float, y: float, width: float, height: float, fill: str, more: str = "") -> str:
    """An SVG rectangle; ``more`` are further attributes."""
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}" {more}/>'


def document(width: float, height: float, body: str, label: str) -> str:
    """An SVG element with its alternative text."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}" '
        f"role=\"img\" aria-label=\"{escape(label, quote=True)}\" style='max-width:100%;height:auto' font-family='{FONT}'>"
        f"{body}</svg>"
    )
