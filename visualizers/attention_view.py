"""The widget AttentionView: a traced attention, stepped tile by tile. All its pictures are sent at once."""

from __future__ import annotations

from html import escape
from typing import Any

import anywidget
import traitlets

from refimpl.errors import RefimplError
from refimpl.tile_records import AttentionTrace
from refimpl.visualizers.attention_tiles import AttentionTiles, num_columns, num_positions
from refimpl.visualizers.figure import count, plain
from refimpl.visualizers.page import script, static_text, style
from refimpl.visualizers.palette import FONT, LIGHT
from refimpl.visualizers.pictured import Pictured
from refimpl.visualizers.static_html import caption_html

FIGURE = AttentionTiles()
MOST_SQUARES = 65_536
"""Scores of all pictures together, each a square: some megabytes for the browser, and under a second to make."""
THEMED = {name: f"var(--{name})" for name in LIGHT}
"""Colours that the page's style sheet says."""


class AttentionView(Pictured, anywidget.AnyWidget):
    """Which scores are computed, and what is kept of them?

    Args:
        trace: what :func:`refimpl.attention.tiles.trace_attention` recorded.
        position: the tile to open at, counted from 0; the last moment by default.

    Raises:
        RefimplError: it is no trace, or has more scores than a picture has room for.

    """

    _esm = (
        script([FIGURE.name])
        + static_text("trace.js")
        + "\nexport default { render: ({ model, el }) => render({ model: traceModel(model), el }) };\n"
    )
    _css = style([FIGURE.name])
    shown = traitlets.List(traitlets.List(traitlets.Unicode())).tag(sync=True)
    heading = traitlets.Unicode("").tag(sync=True)
    transport_shown = traitlets.Bool(True).tag(sync=True)
    position = traitlets.Int(0).tag(sync=True)
    pictures = traitlets.List(traitlets.Dict()).tag(sync=True)
    """Of each position: caption, moment, why, svg."""

    def __init__(self, trace: AttentionTrace, position: int | None = None, **options: Any) -> None:
        if not isinstance(trace, AttentionTrace):
            raise RefimplError(
                f"AttentionView shows what refimpl.attention.tiles.trace_attention returns; this is a {type(trace).__name__}"
            )
        pictures, columns = num_positions(trace), num_columns(trace)
        if (squares := pictures * trace.num_rows * columns) > MOST_SQUARES:
            raise RefimplError(
                f"{count(pictures, 'picture')} of {count(trace.num_rows, 'row')} over {count(columns, 'key')} are "
                f"{squares:,} squares, and there is room for {MOST_SQUARES:,}; trace fewer queries, a shorter context, or "
                "larger tiles"
            )
        last = pictures - 1
        self._pictures = [FIGURE.picture(trace, at) for at in range(last + 1)]
        super().__init__(
            shown=[[FIGURE.name, FIGURE.title, FIGURE.question]],
            heading=_heading(trace),
            position=last if position is None else position,
            pictures=[
                {name: picture[name] for name in ("caption", "moment", "why")} | {"svg": FIGURE.svg(picture, THEMED)}
                for picture in self._pictures
            ],
            **options,
        )

    @traitlets.validate("position")
    def _there_is_such_a_picture(self, proposal: dict[str, Any]) -> int:
        return max(0, min(int(proposal["value"]), len(self._pictures) - 1))

    def _repr_html_(self) -> str:
        """The picture at hand as HTML without a script."""
        picture = self._pictures[self.position]
        reasons = ". ".join(f"<b>{escape(who)}</b> {escape(what)}" if who else escape(what) for who, what in picture["why"])
        where = f"{picture['moment']} {self.position} of {len(self._pictures) - 1}."
        return (
            f"<div style='background:#ffffff;color:#1b1f24;padding:8px;font:13px/1.45 {escape(FONT)}'>"
            f"<p style='margin:0 0 8px'><b>{where}</b> Why? {reasons}</p>"
            f"<h4 style='margin:16px 0 2px;font-size:15px'>{FIGURE.title} "
            f"<small style='font-weight:400;color:#59616b'>{FIGURE.question}</small></h4>"
            f"<p style='margin:0 0 8px;color:#59616b;font-size:12px'>{caption_html(picture['caption'])}</p>"
            f"{FIGURE.svg(picture, LIGHT)}</div>"
        )

    def _repr_text(self) -> str:
        """The picture at hand in letters."""
        picture = self._pictures[self.position]
        return f"{plain(picture['caption'])}\n{FIGURE.text(picture)}"


def _heading(trace: AttentionTrace) -> str:
    """What was computed, in one line."""
    walk = trace.walks[0]
    heads = "one head" if trace.group == 1 else f"{trace.group} heads of a group"
    queries = "1 query" if trace.num_queries == 1 else f"{trace.num_queries} queries"
    return (
        f"Attention of {queries}, {heads}, over {count(trace.context, 'key')} in blocks of {trace.block_size}; "
        f"tiles of {walk.tile_m} rows and {count(walk.tile_n, 'key')}"
    )
