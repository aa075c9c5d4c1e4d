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

from refimpl.errors import RefimplError
from refimpl.visualizers import static_html
from refimpl.visualizers.figure import Figure
from refimpl.visualizers.figures import ALL
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
    """The module of a view with these figures."""
    return static_text("common.js", *(f"{name}.js" for name in names), "shell.js")


def style(names: Sequence[str]) -> str:
    """Its style sheet."""
    return static_text("base.css", *(f"{name}.css" for name in names))


def heading(config: dict[str, Any]) -> str:
    """What ran, in one line, from the log header's ``config``."""
    return (
        f"{config.get('model', 'an engine')}: {config['num_blocks']:,} blocks of {config['block_size']} tokens, "
        f"{config['max_num_batched_tokens']:,} tokens a step at most, {config['max_num_seqs']} slots"
    )


def export_html(source: Any, path: str | Path, figures: Sequence[Figure] = ALL) -> Path:
    """Write a page that shows a log with all its figures, and can be stepped, played and searched for preemptions.

    Args:
        source: an LLM, an Engine, an EventLog, or the path of a saved log.
        path: where the page goes; an existing file is replaced.
        figures: what it shows.

    Raises:
        RefimplError: the source has no log or an empty one, or the file cannot be written.

    """
    player = player_for(source)
    with player.locked():
        player.catch_up()
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
        frames.append(_frame(sender, viewer, first, whole=not frames))
        if len(frames) == CHUNK or position == last:
            chunks.append(_packed(frames))
            frames.clear()
    opening = {
        "shown": [[figure.name, figure.title, figure.question] for figure in figures],
        "heading": heading(history.config) + (f"; the last {last + 1 - first:,} steps of {last + 1:,}" if first else ""),
        "marks": marks(history.records[first:], first),
        "first": first,
        "count": last + 1,
        "size": CHUNK,
        "frame": _frame(Sender(figures), viewer, first, whole=True),
    }
    return opening, chunks


def _frame(sender: Sender, viewer: _Viewer, first: int, whole: bool) -> dict[str, Any]:
    message, buffers = sender.frame(viewer, whole)  # type: ignore[arg-type]
    texts = [base64.b64encode(buffer).decode() for buffer in buffers]
    return {"transport": message["transport"] | {"first": first}, "changes": message["pictures"], "buffers": texts}


def _packed(content: Any) -> str:
    """JSON, gzipped, in base64."""
    return base64.b64encode(gzip.compress(json.dumps(content, separators=(",", ":")).encode(), mtime=0)).decode()


class _Viewer:
    """A player's history seen from a position of its own: exporting moves nobody else."""

    def __init__(self, player: Player, position: int) -> None:
        self.history, self.position = player.history, position
        self.engine = self.pinned = None
        self.live = self.playing = False
        self.speed = player.speed


def _page(opening: dict[str, Any], chunks: list[str], still: str) -> str:
    names = [name for name, _, _ in opening["shown"]]
    module = script(names).replace("</", "<\\/") + "\n" + static_text("page.js").replace("</", "<\\/")
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
<noscript>{still}</noscript>
<script type="module">
{module}
openPage("{_packed(opening)}", {json.dumps(chunks)}, document.getElementById("view"));
</script>
</html>
"""
