"""Frames: what is sent to a browser for one position of a player: pictures of figures, and the transport's state."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from refimpl.events import StepRecord
from refimpl.visualizers.figure import Figure, Picture, count
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
    weight = {"preempted": 0, "exhausted": 0, "copied": 1, "forked": 2, "resumed": 3, "admitted": 3, "prefix_hit": 3}
    order = sorted(
        range(len(sentences)), key=lambda i: (weight.get(state.record.decisions[i].kind, 4) if state.record else 4, i)
    )
    told = [list(sentences[i]) for i in order[:SENTENCES]]
    if len(sentences) > SENTENCES:
        told.append(["", f"and {len(sentences) - SENTENCES:,} more."])
    if not told:
        rows, tokens = len(state.record.sequence_ids), sum(state.record.num_new_tokens)
        told = [["", f"{count(rows, 'sequence')} computed {count(tokens, 'token')}; nothing was decided anew."]]
    return told


def transport(player: Player) -> dict[str, Any]:
    """Where a player stands, for its buttons and its scrubber."""
    history, engine = player.history, player.engine
    record = history.records[player.position] if 0 <= player.position < len(history) else None
    return {
        "position": player.position,
        "count": len(history),
        "step": record.step if record else None,
        "clock": record.updated_at if record else 0.0,
        "live": player.live,
        "playing": player.playing,
        "speed": player.speed,
        "pinned": player.pinned,
        "held": bool(engine is not None and engine.gate.closed),
        "drivable": bool(engine is not None and engine.has_unfinished_requests()),
        "engine": engine is not None,
        "why": why(history, player.position),
    }


def cells_as_text(picture: Picture) -> Picture:
    """A picture that JSON can hold: its packed cells in base64."""
    if isinstance(picture.get("cells"), bytes):
        return picture | {"cells": base64.b64encode(picture["cells"]).decode("ascii")}
    return picture


@dataclass
class Sender:
    """What one browser's view has been sent already, so that only differences follow."""

    figures: Sequence[Figure]
    _marked: int = 0
    """Records whose marks were sent."""
    _cells: dict[str, np.ndarray[Any, Any]] = field(default_factory=dict)
    """By figure, the cells that the view has."""

    def frame(self, player: Player, whole: bool) -> tuple[dict[str, Any], list[bytes]]:
        """The message of a frame, and its buffers. ``whole`` begins anew: for a view that has nothing."""
        if whole:
            self._marked = 0
            self._cells.clear()
        history, position = player.history, player.position
        pictures: dict[str, Picture] = {}
        buffers: list[bytes] = []
        for figure in self.figures:
            picture = figure.picture(history, position)
            if isinstance(picture.get("cells"), bytes):
                picture, buffer = self._difference(figure.name, picture)
                picture["buffer"] = len(buffers)
                buffers.append(buffer)
            pictures[figure.name] = picture
        message = {
            "type": "frame",
            "whole": whole,
            "transport": transport(player),
            "marks": marks(history.records[self._marked :], self._marked),
            "pictures": pictures,
        }
        self._marked = len(history)
        return message, buffers

    def _difference(self, name: str, picture: Picture) -> tuple[Picture, bytes]:
        """The cells that changed, each after its index (both 32-bit words, little-endian), or all of them."""
        new = np.frombuffer(picture["cells"], dtype="<u4").reshape(-1, 2)
        old = self._cells.get(name)
        self._cells[name] = new
        rest = {key: value for key, value in picture.items() if key != "cells"}
        if old is None or len(old) != len(new):
            return rest | {"cells": "all"}, picture["cells"]
        changed = np.flatnonzero((old != new).any(axis=1)).astype("<u4")
        return rest | {"cells": "changed"}, np.column_stack((changed, new[changed])).astype("<u4").tobytes()
