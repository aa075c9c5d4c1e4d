"""AttentionView's picture: which scores does attention compute, and what does it keep of them? One tile after the other.

Unlike other figures it shows no log of an engine, but one computation (:mod:`refimpl.tile_records`), which is all there from
the beginning. Position p is the moment after tile p; where walks were merged, the last position is that.
"""

from __future__ import annotations

import math
from typing import Any

from refimpl.tile_records import AttentionTrace, TileRecord, Vector, Walk
from refimpl.visualizers.attention_tiles_svg import LATER, MASKED, SKIPPED, draw
from refimpl.visualizers.figure import WHOLE, Caption, Look, Picture, count
from refimpl.visualizers.palette import Palette
from refimpl.visualizers.words import letters

MOST_ROWS = 8
"""Rows whose state is told in numbers."""
HUES = 8


class AttentionTiles:
    """Scores by tiles: computed, masked, skipped; and m, l and a of the rows at hand."""

    name = "attention_tiles"
    title = "AttentionView"
    question = "Which scores are computed, and what is kept of them?"
    folds = ()

    def picture(self, trace: AttentionTrace, position: int, look: Look = WHOLE) -> Picture:
        """The moment after the tile at ``position``, or after the merge; positions outside are the first and the last."""
        position = max(0, min(position, num_positions(trace) - 1))
        taken = trace.tiles[: position + 1]
        merged = position == len(trace.tiles)
        grid = _grid(trace, taken, merged)
        counts = {name: sum(row.count(kind) for row in grid) for name, kind in (("masked", MASKED), ("skipped", SKIPPED))}
        counts["computed"] = counts["masked"] + sum(cell >= 0 for row in grid for cell in row)
        counts["all"] = sum(map(len, grid))
        return {
            "caption": _caption(trace, counts, merged),
            "moment": "Merge" if merged else "Tile",
            "why": _merge_words(trace) if merged else _tile_words(trace, position),
            "rows": [row_name(trace, row) for row in range(trace.num_rows)],
            "grid": grid,
            "counts": counts,
            "context": trace.context,
            "block_size": trace.block_size,
            "block_table": list(trace.block_table),
            "walks": [[walk.first_row, walk.end_row, walk.first_key, walk.end_key, i % HUES] for i, walk in _named(trace)],
            "now": None if merged else _outline(trace, taken[-1]),
            "state": _merged_state(trace) if merged else _state(trace, position),
        }

    def svg(self, picture: Picture, palette: Palette) -> str:
        """The grid of scores, and beside it the state."""
        return draw(picture, palette)

    def text(self, picture: Picture) -> str:
        """The grid in letters: a walk's letter where a score counts, ``x`` masked, ``·`` skipped, ``?`` later."""
        names = max(map(len, picture["rows"]))
        signs = {MASKED: "x", SKIPPED: "·", LATER: "?"}
        lines = []
        for row, (name, cells) in enumerate(zip(picture["rows"], picture["grid"], strict=True)):
            shown = (signs.get(cell) or letters(_walk_at(picture["walks"], row, key)) for key, cell in enumerate(cells))
            lines.append(f"{name:>{names}} {''.join(shown)}")
        table = [picture["state"]["head"], *picture["state"]["rows"]]
        return "\n".join([*lines, *("  ".join(f"{cell:>8}" for cell in cells) for cells in table)])


def num_positions(trace: AttentionTrace) -> int:
    """Moments of a trace: its tiles, and the merge."""
    return len(trace.tiles) + (trace.merge is not None)


def num_columns(trace: AttentionTrace) -> int:
    """Keys that are drawn: up to the end of the last tile."""
    return max(_end(walk) for walk in trace.walks)


def row_name(trace: AttentionTrace, row: int) -> str:
    """``query 3``, ``head 2``, or both where there are several of both."""
    query, head = divmod(row, trace.group)
    if trace.group == 1:
        return f"query {query}"
    return f"head {head}" if trace.num_queries == 1 else f"query {query}, head {head}"


def _named(trace: AttentionTrace) -> list[tuple[int, Walk]]:
    """Each walk with its number."""
    return list(enumerate(trace.walks))


def _walk_at(walks: list[list[int]], row: int, key: int) -> int:
    """The walk that computes a score, or the last one of that row."""
    own = [i for i, walk in enumerate(walks) if walk[0] <= row < walk[1]]
    return next((i for i in own if walks[i][2] <= key < walks[i][3]), own[-1])


# ---------------------------------------------------------------------- the grid


def _grid(trace: AttentionTrace, taken: tuple[TileRecord, ...], merged: bool) -> list[list[int]]:
    """A cell a score: its weight in percent of the row's largest so far, or what else became of it."""
    columns = num_columns(trace)
    grid = [[SKIPPED] * columns for _ in range(trace.num_rows)]
    for walk in trace.walks:
        for row in range(walk.first_row, walk.end_row):
            for key in range(walk.first_key, _end(walk)):
                grid[row][key] = LATER
    largest = _largest(trace, taken, merged)
    for tile in taken:
        walk = trace.walks[tile.walk]
        for row, scores in enumerate(tile.scores, walk.first_row):
            for key, score in enumerate(scores, tile.first_key):
                seen = score > -math.inf
                grid[row][key] = round(100 * math.exp(score - largest[tile.walk][row - walk.first_row])) if seen else MASKED
    return grid


def _end(walk: Walk) -> int:
    """The end of a walk's last tile, which may reach beyond its last key."""
    return walk.first_key + walk.num_tiles * walk.tile_n


def _largest(trace: AttentionTrace, taken: tuple[TileRecord, ...], merged: bool) -> dict[int, Vector]:
    """By walk, the largest score of each of its rows so far; after the merge, that of all walks over the row."""
    found = {tile.walk: tile.row_max for tile in taken}
    if not merged:
        return found
    over_all = [
        max(found[i][row - walk.first_row] for i, walk in _named(trace) if walk.first_row <= row < walk.end_row)
        for row in range(trace.num_rows)
    ]
    return {i: tuple(over_all[walk.first_row : walk.end_row]) for i, walk in _named(trace)}


def _outline(trace: AttentionTrace, tile: TileRecord) -> list[int]:
    walk = trace.walks[tile.walk]
    return [walk.first_row, walk.end_row, tile.first_key, tile.first_key + walk.tile_n]


# ---------------------------------------------------------------------- the state in numbers


def _state(trace: AttentionTrace, position: int) -> dict[str, Any]:
    """m, the factor, l and a of the rows of the walk at hand."""
    tile = trace.tiles[position]
    walk = trace.walks[tile.walk]
    shown = range(min(MOST_ROWS, walk.end_row - walk.first_row))
    dims = len(tile.attended[0])
    return {
        "title": f"The rows of walk {letters(tile.walk)} after this tile",
        "head": ["", "m", "× old", "l", *(f"a{dim}" for dim in range(dims))],
        "rows": [
            [
                row_name(trace, walk.first_row + row),
                number(tile.row_max[row]),
                number(tile.rescale[row]),
                number(tile.row_sum[row]),
                *(number(value) for value in tile.attended[row]),
            ]
            for row in shown
        ],
        "strong": [tile.rescale[row] < 1 and not _starts(trace, position) for row in shown],
        "not_shown": walk.end_row - walk.first_row - len(shown),
        "hue": tile.walk % HUES,
    }


def _merged_state(trace: AttentionTrace) -> dict[str, Any]:
    """Each walk's share of a row, and the output."""
    assert trace.merge is not None
    shown = range(min(MOST_ROWS, trace.num_rows))
    dims = len(trace.output[0])
    return {
        "title": "The walks merged: exp(m + log l) of each, as a share of their sum",
        "head": ["", *(f"of {letters(walk)}" for walk, _ in _named(trace)), *(f"out{dim}" for dim in range(dims))],
        "rows": [
            [
                row_name(trace, row),
                *(f"{100 * shares[row]:.0f}%" for shares in trace.merge.shares),
                *(number(value) for value in trace.output[row]),
            ]
            for row in shown
        ],
        "strong": [False] * len(shown),
        "not_shown": trace.num_rows - len(shown),
        "hue": None,
    }


def _starts(trace: AttentionTrace, position: int) -> bool:
    """Whether a tile is the first of its walk: what was there before was empty."""
    return position == 0 or trace.tiles[position - 1].walk != trace.tiles[position].walk


def number(value: float) -> str:
    """Two decimals, with a true minus; −∞ for what has seen nothing."""
    if value == -math.inf:
        return "−∞"
    return f"{value:.2f}".replace("-", "−")


# ---------------------------------------------------------------------- words


def _span(what: str, first: int, end: int) -> str:
    return f"{what} {first}" if end - first == 1 else f"{what}s {first} to {end - 1}"


def _caption(trace: AttentionTrace, counts: dict[str, int], merged: bool) -> Caption:
    answer = (
        f"Of {counts['all']:,} scores {counts['computed']:,} are computed so far, {counts['masked']:,} of them masked; "
        f"{counts['skipped']:,} never are."
    )
    kept = len(trace.output[0]) + 2
    rest = f" Of all of them a row keeps {kept} numbers: m, l and {kept - 2} of a."
    rest += " The more a score weighs by now, the stronger its colour."
    if merged:
        rest = f" {count(len(trace.walks), 'walk')} went side by side, and their averages are merged into one."
    return [(answer, True), (rest, False)]


def _tile_words(trace: AttentionTrace, position: int) -> list[list[str]]:
    """Who took in which keys, and the row whose past was scaled down most."""
    tile = trace.tiles[position]
    walk = trace.walks[tile.walk]
    end = min(tile.first_key + walk.tile_n, walk.end_key)
    ids = ", ".join(map(str, tile.block_ids))
    blocks = f"block {ids}" if len(tile.block_ids) == 1 else f"blocks {ids}"
    if not tile.masked:
        how = "every row sees the whole tile, and nothing is compared"
    else:
        hidden = sum(score == -math.inf for row in tile.scores for score in row)
        how = f"positions are compared, and {count(hidden, 'score')} masked"
    told = [[f"Walk {letters(tile.walk)}", f"takes in {_span('key', tile.first_key, end)}, from {blocks}: {how}"]]
    if _starts(trace, position):
        return [*told, ["", "Its first tile: m, l and a were empty."]]
    row = min(range(len(tile.rescale)), key=lambda row: tile.rescale[row])
    if tile.rescale[row] == 1:
        return [*told, ["", "No row has a new largest score: nothing is rescaled."]]
    before, name = trace.tiles[position - 1].row_max[row], row_name(trace, walk.first_row + row)
    rise = f"from {number(before)} to {number(tile.row_max[row])}"
    return [
        *told,
        ["", f"The largest score of {name} rises {rise}: its l and a are multiplied by {number(tile.rescale[row])}."],
    ]


def _merge_words(trace: AttentionTrace) -> list[list[str]]:
    """What the merge does."""
    return [
        ["The merge", f"weighs {len(trace.walks)} averages by their denominators: what is left is softmax over all keys."]
    ]
