"""The swap space in pictures: whose blocks are on the host, as a strip of hollow squares, as lines, and in words."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from refimpl.visualizers.figure import Caption, count, rect, text
from refimpl.visualizers.palette import Palette, hue
from refimpl.visualizers.state import State
from refimpl.visualizers.words import names

MOST_BLOCKS = 200
"""Host blocks that are drawn; more are counted."""
MOST_LINES = 4
"""Swapped sequences that are told one by one."""
MOST_RUNS = 8
CELL, PITCH = 14, 18


def strip(state: State) -> dict[str, Any] | None:
    """[host block, letters, hue, request] of the blocks in use, and their number; None where there is no swap space."""
    if not state.num_host_blocks:
        return None
    owners = state.swapped.owners()
    cells = []
    for host_id in list(owners)[:MOST_BLOCKS]:
        first, *others = (state.sequences[sequence_id] for sequence_id in owners[host_id])
        letters = names(sequence.letter for sequence in (first, *others))
        cells.append([host_id, f"×{len(others) + 1}" if others else first.letter, first.hue, first.request_id, letters])
    return {"num_blocks": state.num_host_blocks, "used": len(owners), "cells": cells, "title": _title(state, len(owners))}


def _title(state: State, used: int) -> str:
    left = f", {MOST_BLOCKS} drawn" if used > MOST_BLOCKS else ""
    return f"swap space on the host: {used:,} of {count(state.num_host_blocks, 'block')} in use{left}"


def draw(picture: dict[str, Any], y: float, width: float, palette: Palette) -> tuple[str, float]:
    """The strip's drawing from ``y`` on, and its height."""
    columns = max(1, int(width // PITCH))
    parts = [text(28, y + 8, picture["title"], palette["ink2"], size=12)]
    for place, (_, letter, number, _, _) in enumerate(picture["cells"]):
        x, top = 28 + place % columns * PITCH, y + 20 + place // columns * PITCH
        stroke = f'stroke="{hue(palette, number)}" stroke-width="1.5"'
        parts.append(rect(x + 1, top + 1, CELL - 2, CELL - 2, "none", stroke))
        if len(letter) < 3:
            middle = x + CELL / 2
            parts.append(text(middle, top + CELL / 2, letter, palette["ink"], size=8, weight=600, anchor="middle"))
    return "".join(parts), 24 + -(-len(picture["cells"]) // columns) * PITCH


def told(state: State) -> Caption:
    """How much of the swap space is used, and by whom; nothing where there is none."""
    if not state.num_host_blocks:
        return []
    used, size = state.swapped.num_used, count(state.num_host_blocks, "block")
    parts: Caption = [(" Swap space: ", False), (f"{used:,} of {size} used", True)]
    if state.swapped.tables:
        parts.append((f", by {names(state.sequences[s].letter for s in sorted(state.swapped.tables))}", False))
    return [*parts, (".", False)]


def lines(state: State) -> list[list[Any]]:
    """[letter, hue, request, words] of swapped sequences: where each logical block of their tables is."""
    swapped = sorted(state.swapped.tables)
    found: list[list[Any]] = []
    for sequence_id in swapped[:MOST_LINES]:
        sequence, places = state.sequences[sequence_id], state.swapped.tables[sequence_id]
        runs = [_run(on_host, [index for index, _ in run]) for on_host, run in _runs(places)]
        more = f"; {len(runs) - MOST_RUNS} more runs" if len(runs) > MOST_RUNS else ""
        where = "; ".join(runs[:MOST_RUNS]) + more or "no blocks"
        found.append([sequence.letter, sequence.hue, sequence.request_id, f"is swapped out: {where}"])
    if len(swapped) > MOST_LINES:
        found.append(["", None, "", f"and {count(len(swapped) - MOST_LINES, 'more swapped sequence')}"])
    return found


def _runs(places: Any) -> Any:
    return groupby(enumerate(places), key=lambda entry: entry[1].on_host)


def _run(on_host: bool, indices: list[int]) -> str:
    what = f"logical block {indices[0]}" if len(indices) == 1 else f"logical blocks {indices[0]} to {indices[-1]}"
    return f"{what} on the host" if on_host else f"{what} held here, which others use"
