"""Pictures without a browser's help: HTML with inline SVG, captions and the "Why?" line, and no script."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from refimpl.visualizers.figure import Caption, Figure, prepare
from refimpl.visualizers.frames import why
from refimpl.visualizers.history import History
from refimpl.visualizers.palette import FONT, LIGHT


def caption_html(caption: Caption) -> str:
    """Bold parts in ``<b>``."""
    return "".join(f"<b>{escape(text)}</b>" if bold else escape(text) for text, bold in caption)


def figures(shown: Sequence[Figure], history: History, position: int) -> str:
    """The pictures of some figures at one position."""
    prepare(history, shown)
    record = history.records[position] if history.first <= position < len(history) else None
    where = f"Step {record.step} of {history.records[-1].step}." if record else "No step yet."
    if history.first:
        where += f" The first {history.first:,} records are not kept any more."
    reasons = " ".join(f"<b>{escape(who)}</b> {escape(what)}" for who, what in why(history, position))
    parts = [f"<p style='margin:0 0 8px'><b>{where}</b> Why? {reasons}</p>"]
    for figure in shown:
        picture = figure.picture(history, position)
        parts.append(
            f"<h4 style='margin:16px 0 2px;font-size:15px'>{escape(figure.title)} "
            f"<small style='font-weight:400;color:#59616b'>{escape(figure.question)}</small></h4>"
            f"<p style='margin:0 0 8px;color:#59616b;font-size:12px'>{caption_html(picture['caption'])}</p>"
            + figure.svg(picture, LIGHT)
        )
    return f"<div style='background:#ffffff;color:#1b1f24;padding:8px;font:13px/1.45 {escape(FONT)}'>{''.join(parts)}</div>"
