"""Exported pages: a log that can be stepped through in any browser, without a kernel or a network."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Sequence
from functools import cache
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from refimpl.errors import RefimplError
from refimpl.visualizers import static_html
from refimpl.visualizers.figure import Figure
from refimpl.visualizers.figures import figures_of
from refimpl.visualizers.frames import Sender, marks
from refimpl.visualizers.player import Player
from refimpl.visualizers.source import player_for

MOST_STEPS = 5_000
"""A page holds at most this many steps: the last ones of a longer log."""
CHUNK = 64
"""Steps that are packed together: what a jump unpacks."""


@cache
def static_text(*names: str) -> str:
    """Files of ``static/``, one after the other; a style sheet that a figure does not have is left out."""
    folder = files("refimpl.visualizers").joinpath("static")
    found = [folder.joinpath(name) for name in names]
    return "\n".join(file.read_text(encoding="utf-8") for file in found if file.is_file() or not file.name.endswith(".css"))


def script(names: Sequence[str]) -> str:
    """What draws a view with these figures: it defines ``render``."""
    return static_text("common.js", *(f"{name}.js" for name in names), "shell.js")


def module(names: Sequence[str]) -> str:
    """The same as a module for anywidget."""
    return f"{script(names)}\nexport default {{ render }};\n"


def style(names: Sequence[str]) -> str:
    """Its style sheet."""
    return static_text("base.css", *(f"{name}.css" for name in names))


def heading(config: dict[str, Any]) -> str:
    """What ran, in one line, from the log header's ``config``."""
    return (
        f"{config.get('model', 'an engine')}: {config['num_blocks']:,} blocks of {config['block_size']} tokens, "
        f"{config['max_num_batched_tokens']:,} tokens a step at most, {config['max_num_seqs']} slots"
    )


def export_html(source: Any, path: str | Path, figures: Sequence[Figure] | None = None) -> Path:
    """Write a page that shows a log with all its figures, and can be stepped, played and searched for preemptions.

    Args:
        source: an LLM, an Engine, an EventLog, or the path of a saved log.
        path: where the page goes; an existing file is replaced.
        figures: what it shows; by default all that the log has something for.

    Raises:
        RefimplError: the source has no log or an empty one, or the file cannot be written.

    """
    player = player_for(source)
    with player.locked():
        player.catch_up()
        figures = figures_of(player.history.config) if figures is None else figures
        if not len(player.history):
            raise RefimplError("there is nothing to export: no step has run yet")
        opening, chunks = _record(player, figures)
        still = static_html.figures(figures, player.history, len(player.history) - 1)
    target = Path(path)
    try:
        target.write_text(_page(opening, chunks, still), encoding="utf-8")
    except OSError as error:
        raise RefimplError(f"{target} cannot be written: {error}") from error
    return target


def _record(player: Player, figures: Sequence[Figure]) -> tuple[dict[str, Any], list[str]]:
    """What is shown at once, the last frame in it; and all frames, packed in chunks whose first ones are whole."""
    history = player.history
    first, last = max(history.first, len(history) - MOST_STEPS), len(history) - 1
    viewer, sender, chunks, frames = _Viewer(player, first), Sender(figures), list[str](), list[dict[str, Any]]()
    for position in range(first, last + 1):
        viewer.position = position
        frame, buffers = _frame(sender, viewer, first, whole=not frames)
        frames.append(frame | {"buffers": [_text(buffer) for buffer in buffers]})
        if len(frames) == CHUNK or position == last:
            chunks.append(_packed(frames))
            frames.clear()
    frame, buffers = _frame(Sender(figures), viewer, first, whole=True)
    opening = {
        "shown": [[figure.name, figure.title, figure.question] for figure in figures],
        "heading": heading(history.config) + (f"; the last {last + 1 - first:,} steps of {last + 1:,}" if first else ""),
        "marks": marks(history.records[first:], first),
        "first": first,
        "count": last + 1,
        "size": CHUNK,
        "frame": frame | {"buffers": [_text(_runs(buffer)) for buffer in buffers]},
    }
    return opening, chunks


def _frame(sender: Sender, viewer: _Viewer, first: int, whole: bool) -> tuple[dict[str, Any], list[bytes]]:
    message, buffers = sender.frame(viewer, whole)  # type: ignore[arg-type]
    return {"transport": message["transport"] | {"first": first}, "changes": message["pictures"]}, buffers


def _runs(cells: bytes) -> bytes:
    """Equal neighbours once: the cell of each run, then the runs' lengths as 32-bit words, little-endian."""
    words = np.frombuffer(cells, dtype="<u8")
    starts = np.flatnonzero(np.concatenate(([True], words[1:] != words[:-1])))
    lengths = np.diff(starts, append=len(words)).astype("<u4")
    return words[starts].tobytes() + lengths.tobytes()


def _text(content: bytes) -> str:
    return base64.b64encode(content).decode()


def _json(content: Any) -> str:
    return json.dumps(content, separators=(",", ":"))


def _packed(content: Any) -> str:
    """JSON, gzipped, in base64."""
    return _text(gzip.compress(_json(content).encode(), mtime=0))


class _Viewer:
    """A player's history seen from a position of its own: exporting moves nobody else."""

    def __init__(self, player: Player, position: int) -> None:
        self.history, self.position = player.history, position
        self.engine = self.pinned = None
        self.live = self.playing = False
        self.speed = player.speed


def _page(opening: dict[str, Any], chunks: list[str], still: str) -> str:
    """The script stands before what is large: the first picture is drawn while the rest of the page is read."""
    names = [name for name, _, _ in opening["shown"]]
    code = f"{script(names)}\n{static_text('page.js')}".replace("</", "<\\/")
    known = _json(opening).replace("<", r"\u003c")  # no text of the log ends the element
    data = "\n".join(f'<script type="text/plain" id="chunk-{number}">{text}</script>' for number, text in enumerate(chunks))
    return f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>refimpl: {escape(opening["heading"])}</title>
<style>
body {{ margin: 0; }}
{style(names)}
</style>
<div id="view"></div>
<script type="application/json" id="opening">{known}</script>
<script>
(() => {{
"use strict";
{code}
openPage(document.getElementById("opening"), document.getElementById("view"));
}})();
</script>
<noscript>{still}</noscript>
{data}
</html>
"""
