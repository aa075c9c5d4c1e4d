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
        recorded = _record(player, figures)
        still = static_html.figures(figures, player.history, len(player.history) - 1)
    packed = base64.b64encode(gzip.compress(json.dumps(recorded, separators=(",", ":")).encode(), mtime=0)).decode()
    target = Path(path)
    try:
        target.write_text(_page(recorded, packed, still), encoding="utf-8")
    except OSError as error:
        raise RefimplError(f"{target} cannot be written: {error}") from error
    return target


def _record(player: Player, figures: Sequence[Figure]) -> dict[str, Any]:
    """Every frame, as what changed since the one before."""
    history = player.history
    first = max(history.first, len(history) - MOST_STEPS)
    viewer, sender, frames = _Viewer(player, first), Sender(figures), []
    for position in range(first, len(history)):
        viewer.position = position
        message, buffers = sender.frame(viewer, whole=position == first)  # type: ignore[arg-type]
        frames.append(
            {
                "transport": message["transport"] | {"first": first},
                "changes": message["pictures"],
                "buffers": [base64.b64encode(buffer).decode() for buffer in buffers],
            }
        )
    title = heading(history.config) + (f"; the last {len(history) - first:,} steps of {len(history):,}" if first else "")
    found = marks(history.records[first:], first)
    return {"shown": [[f.name, f.title, f.question] for f in figures], "heading": title, "frames": frames, "marks": found}


class _Viewer:
    """A player's history seen from a position of its own: exporting moves nobody else."""

    def __init__(self, player: Player, position: int) -> None:
        self.history, self.position = player.history, position
        self.engine = self.pinned = None
        self.live = self.playing = False
        self.speed = player.speed


def _page(recorded: dict[str, Any], packed: str, still: str) -> str:
    names = [name for name, _, _ in recorded["shown"]]
    module = script(names).replace("</", "<\\/") + "\n" + static_text("page.js")
    return f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>refimpl: {escape(recorded["heading"])}</title>
<style>
body {{ margin: 0; }}
{style(names)}
</style>
<div id="view"></div>
<noscript>{still}</noscript>
<script type="module">
{module}
openPage("{packed}", document.getElementById("view"));
</script>
</html>
"""
