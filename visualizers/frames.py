"""Frames: what is sent to a browser for one position of a player: pictures of figures, and the transport's state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from refimpl.events import StepRecord
from refimpl.visualizers.figure import WIDTH, Figure, Look, Picture, count, prepare
from refimpl.visualizers.history import History
from refimpl.visualizers.player import Player

SENTENCES = 3
"""Reasons that the "Why?" line tells; more are counted."""


def marks(records: Sequence[StepRecord], first: int) -> list[list[Any]]:
    """[position, kind] of what the scrubber shows of records: preemptions, copies, arrivals."""
    found: list[list[Any]] = []
    for position, record in enumerate(records, start=first):
        if record.preempted:
            found.append([position, "preemption"])
        if record.copies:
            found.append([position, "copy"])
        if record.arrived:
            found.append([position, "arrival"])
    return found


def why(history: History, position: int) -> list[list[str]]:
    """The "Why?" line: [who, what] for the first decisions of a step, the weightier ones first."""
    state = history.state_at(position)
    if state.record is None:
        return [["", "Nothing has run yet."]]
    sentences = state.sentences()
    weight = {"preempted": 0, "dropped_swap": 0, "exhausted": 0, "copied": 1, "forked": 2, "swapped_in": 3, "resumed": 3}
    weight |= {"admitted": 3, "prefix_hit": 3}
    order = sorted(
        range(len(sentences)), key=lambda i: (weight.get(state.record.decisions[i].kind, 4) if state.record else 4, i)
    )
    told = [list(sentences[i]) for i in order[:SENTENCES]]
    if len(sentences) > SENTENCES:
        told.append(["", f"and {len(sentences) - SENTENCES:,} more."])
    if not told:
        rows, tokens = len(state.record.sequence_ids), sum(state.record.num_new_tokens)
        drafts = ""
        if num_drafts := sum(state.record.num_drafts):
            drafts = f", {num_drafts:,} of them drafts, of which {sum(state.record.num_accepted):,} were accepted"
        told = [["", f"{count(rows, 'sequence')} computed {count(tokens, 'token')}{drafts}; nothing was decided anew."]]
    return told


def transport(player: Player) -> dict[str, Any]:
    """Where a player stands, for its buttons and its scrubber."""
    history, engine = player.history, player.engine
    record = history.records[player.position] if history.first <= player.position < len(history) else None
    return {
        "position": player.position,
        "first": history.first,
        "gone": history.first,
        "count": len(history),
        "step": record.step if record else None,
        "clock": record.updated_at if record else 0.0,
        "live": player.live,
        "playing": player.playing,
        "speed": player.speed,
        "pinned": player.pinned,
        "held": bool(engine is not None and engine.gate.closed),
        "drivable": bool(engine is not None and engine.can_step()),
        "engine": engine is not None,
        "why": why(history, player.position),
    }


class Sender:
    """What one browser's view has been sent already, so that only differences follow.

    Args:
        figures: those of the view.

    """

    def __init__(self, figures: Sequence[Figure]) -> None:
        self.width = WIDTH
        """Pixels of the view."""
        self._figures = figures
        self._history: History | None = None
        self._num_marked = 0
        """Records whose marks were sent."""
        self._sent: dict[str, Picture] = {}
        """By figure, what the view has."""

    def frame(self, player: Player, whole: bool) -> tuple[dict[str, Any], list[bytes]]:
        """The message of a frame, and its buffers: of each picture, the keys whose values changed.

        ``whole`` begins anew: for a view that has nothing. So does a history that began anew.
        """
        history, position = player.history, player.position
        whole = whole or history is not self._history
        if whole:
            self._history, self._num_marked = history, history.first
            self._sent.clear()
        prepare(history, self._figures)
        look = Look(self.width, player.pinned)
        pictures: dict[str, Picture] = {}
        buffers: list[bytes] = []
        for figure in self._figures:
            picture = figure.picture(history, position, look)
            before = self._sent.get(figure.name, {})
            changes = {key: value for key, value in picture.items() if key not in before or before[key] != value}
            if isinstance(changes.get("cells"), bytes):
                changes["cells"], cells = _difference(before.get("cells"), changes["cells"])
                changes["buffer"] = len(buffers)
                buffers.append(cells)
            self._sent[figure.name] = picture
            if changes:
                pictures[figure.name] = changes
        message = {
            "type": "frame",
            "whole": whole,
            "transport": transport(player),
            "marks": marks(history.records[self._num_marked :], max(history.first, self._num_marked)),
            "pictures": pictures,
        }
        self._num_marked = len(history)
        return message, buffers


def _difference(old: bytes | None, new: bytes) -> tuple[str, bytes]:
    """The cells that changed, each after its index (32-bit words, little-endian), or all of them."""
    if old is None or len(old) != len(new):
        return "all", new
    changed = np.flatnonzero(np.frombuffer(old, dtype="<u8") != np.frombuffer(new, dtype="<u8"))
    cells = np.frombuffer(new, dtype="<u4").reshape(-1, 2)[changed]
    return "changed", np.column_stack((changed.astype("<u4"), cells)).tobytes()
