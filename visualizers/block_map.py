"""BlockMap: which sequence owns this block? One cell a block; a cell fills from below as its slots fill."""

from __future__ import annotations

import struct
from collections import Counter
from itertools import chain, groupby
from typing import Any

import numpy as np

from refimpl.visualizers import host_strip
from refimpl.visualizers.blocks import NULL_BLOCK
from refimpl.visualizers.figure import WHOLE, WIDTH, Caption, Look, Picture, count, document, plain, rect, text
from refimpl.visualizers.history import History
from refimpl.visualizers.palette import Palette, hue, mix, on
from refimpl.visualizers.sequence_state import SequenceState
from refimpl.visualizers.state import State

CELL = struct.Struct("<IBBBx")
"""One block: the oldest owner's sequence id + 1 (0: none), owners, 255 times its fill, kind."""
KINDS = ("free", "cached", "owned", "shared", "null")
OWNED = KINDS.index("owned")
MOST_ROWS = 40
"""Sequences in the table beside the map; more are counted in words."""
MOST_SHARED = 4_000
LETTERS_UP_TO = 2_000
"""Blocks that are drawn with letters; more are pixels."""


class BlockMap:
    """The figure; see :class:`refimpl.visualizers.figure.Figure`."""

    name = "block_map"
    title = "BlockMap"
    question = "Which sequence owns this block?"
    folds = ()

    def picture(self, history: History, position: int, look: Look = WHOLE) -> Picture:
        """Cells as packed bytes (:data:`CELL`), and the sequences that own them."""
        state = history.state_at(position)
        owners = [one for one in state.alive() if one.table or state.num_device_blocks(one)]
        counts = state.counts()
        shared = {block: list(ids) for block, ids in state.shared_blocks(MOST_SHARED)}
        shared_of = Counter(chain.from_iterable(state.blocks.shared.values()))
        return {
            "caption": _caption(state, counts),
            "block_size": state.block_size,
            "num_blocks": state.num_blocks,
            "cells": pack(state),
            "shared": shared,
            "copies": [] if state.record is None else [[copy.source, copy.target] for copy in state.record.copies],
            "counts": counts,
            "host": host_strip.strip(state),
            "sequences": {s.sequence_id: [s.letter, s.hue, s.request_id] for s in owners},
            "rows": [_row(s, state, shared_of[s.sequence_id]) for s in owners[:MOST_ROWS]],
            "more_rows": max(0, len(owners) - MOST_ROWS),
        }

    def card(self, history: History, position: int, block_id: int) -> dict[str, Any]:
        """All of one block, for who points at it."""
        state = history.state_at(position)
        block = state.block(block_id)
        owners = [state.sequences[owner] for owner in block.owners]
        first = block.index * state.block_size
        return {
            "block": block_id,
            "kind": block.kind,
            "owners": [[s.letter, s.hue, s.name] for s in owners],
            "index": block.index,
            "fill": block.fill,
            "published": block.published,
            "tokens": owners[0].token_texts[first : first + block.fill] if owners else [],
        }

    def svg(self, picture: Picture, palette: Palette) -> str:
        """Cells with letters up to :data:`LETTERS_UP_TO` blocks, without beyond; the counts beside them."""
        num_cells = picture["num_blocks"] + 1
        pitch = 31 if num_cells <= 200 else 16 if num_cells <= LETTERS_UP_TO else 4
        columns = max(1, min(num_cells, 820 // pitch))
        body = _svg_runs(picture, columns, pitch, palette) if pitch == 4 else []
        for block_id, (owner, owners, fill, kind) in enumerate(CELL.iter_unpack(picture["cells"]) if pitch > 4 else ()):
            x, y = 28 + block_id % columns * pitch, 5 + block_id // columns * pitch
            sequence = picture["sequences"].get(owner - 1)
            body.append(_svg_cell(x, y, pitch - 3, KINDS[kind], owners, fill / 255, sequence, palette))
        height = 5 + -(-num_cells // columns) * pitch
        if picture["host"]:
            drawn, tall = host_strip.draw(picture["host"], height + 8, columns * pitch, palette)
            body.append(drawn)
            height += 8 + tall
        x = 28 + columns * pitch + 32
        counts = [*picture["counts"].items(), ("null block", 1)]
        for row, (name, number) in enumerate(counts):
            body.append(text(x, 16 + 20 * row, name, palette["ink2"], size=12))
            body.append(text(x + 150, 16 + 20 * row, f"{number:,}", palette["ink"], size=12, anchor="end"))
        return document(WIDTH, max(height, 20 * len(counts) + 20), "".join(body), plain(picture["caption"]))


def pack(state: State) -> bytes:
    """All cells of a pool. Whole words are put together: single bytes, one cell apart, take ten times as long."""
    blocks = state.blocks
    owned = blocks.num_owners > 0
    kinds = (owned & np.uint8(1)) * np.uint8(OWNED) | (~owned & (blocks.published > 0))
    kinds[list(blocks.shared)] = KINDS.index("shared")
    kinds[NULL_BLOCK] = KINDS.index("null")
    words = kinds.astype("<u4")
    words <<= 8
    words |= state.fills() * np.uint32(255) // np.uint32(state.block_size)
    words <<= 8
    words |= np.minimum(blocks.num_owners, 255).view(np.uint32)
    cells = np.empty((state.num_blocks + 1, 2), dtype="<u4")
    cells[:, 0] = blocks.owner
    cells[:, 0] += 1
    cells[:, 1] = words
    return cells.tobytes()


def _row(sequence: SequenceState, state: State, shared: int) -> list[Any]:
    """Letter, hue, request, blocks, shared ones, tokens in them, empty slots."""
    num_blocks = state.num_device_blocks(sequence)
    held = num_blocks * state.block_size
    tokens = min(sequence.num_computed_tokens, held)
    return [sequence.letter, sequence.hue, sequence.request_id, num_blocks, shared, tokens, held - tokens]


def _caption(state: State, counts: dict[str, int]) -> Caption:
    used = counts["owned"] + counts["shared"]
    if state.record is None:
        return [("Nothing has run yet: ", False), (f"all {count(state.num_blocks, 'block')} are free", True), (".", False)]
    held = "hold running and swapped sequences" if state.swapped.tables else "hold running sequences"
    parts: Caption = [
        (f"{used:,} of {state.num_blocks:,}", True),
        (f" blocks {held}, {counts['shared']:,} of them shared; {counts['cached']:,} ", False),
        ("keep a prefix that no running sequence uses, and can be taken; ", False),
        (f"{counts['free']:,} {'is' if counts['free'] == 1 else 'are'} free.", False),
        (f" A cell fills from below as its {count(state.block_size, 'slot')} fill.", False),
    ]
    parts += host_strip.told(state)
    if state.truncated:
        parts.append((" The log begins in the middle of the run: what ran before is not shown.", True))
    return parts


def _svg_runs(picture: Picture, columns: int, pitch: int, palette: Palette) -> list[str]:
    """Thousands of blocks: neighbours of one colour in a row are one rectangle."""
    body = []
    cells = enumerate(CELL.iter_unpack(picture["cells"]))
    for (row, owner, kind), run in groupby(cells, key=lambda cell: (cell[0] // columns, cell[1][0], cell[1][3])):
        ids = [block_id for block_id, _ in run]
        sequence = picture["sequences"].get(owner - 1)
        colour = hue(palette, sequence[1]) if sequence else palette["cached" if KINDS[kind] == "cached" else "free"]
        body.append(rect(28 + ids[0] % columns * pitch, 5 + row * pitch, len(ids) * pitch - 1, pitch - 1, colour))
    return body


def _svg_cell(x: float, y: float, size: float, kind: str, owners: int, fill: float, sequence: Any, palette: Palette) -> str:
    if kind == "null":
        stroke = f'stroke="{palette["ink3"]}"'
        return rect(x + 0.5, y + 0.5, size - 1, size - 1, "none", stroke)
    if kind in ("free", "cached") or sequence is None:
        dot = f'<circle cx="{x + size / 2:g}" cy="{y + size / 2:g}" r="1.3" fill="{palette["ink3"]}"/>' if size > 9 else ""
        return rect(x, y, size, size, palette["cached" if kind == "cached" else "free"]) + (dot if kind == "free" else "")
    letter, number, _ = sequence
    colour = hue(palette, number)
    body = rect(x, y, size, size, mix(colour, palette["bg"], 0.78)) + rect(
        x, y + size * (1 - fill), size, size * fill, colour
    )
    if size < 13:
        return body
    label, weight = (f"×{owners}", 650) if kind == "shared" else (letter, 600)
    if kind == "shared":
        body += rect(x + size / 2 - 10, y + size / 2 - 7, 20, 14, palette["bg"])
        return body + text(x + size / 2, y + size / 2, label, palette["ink"], size=10, weight=weight, anchor="middle")
    high = fill >= 0.5
    middle = y + size * (1 - fill / 2) if high else y + size * (1 - fill) / 2
    return body + text(
        x + size / 2, middle, label, on(colour) if high else palette["ink"], size=10, weight=weight, anchor="middle"
    )


FIGURE = BlockMap()
