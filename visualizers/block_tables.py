"""BlockTables: when is a shared block copied, and who pays? Copy-on-write in three moments, drawn for the latest copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

from refimpl.events import StepRecord
from refimpl.outputs import BlockCopy
from refimpl.visualizers import host_strip
from refimpl.visualizers.block_tables_svg import draw
from refimpl.visualizers.copies import Copies
from refimpl.visualizers.figure import WHOLE, Caption, Look, Picture, count
from refimpl.visualizers.history import History
from refimpl.visualizers.palette import Palette
from refimpl.visualizers.sequence_state import SequenceState
from refimpl.visualizers.state import State
from refimpl.visualizers.words import names, readable

MAX_TABLES = 4
HEAD = 8
"""Entries sent from the head of a table; with its last one, more than fit."""
MAX_TOKENS = 32
"""Tokens of a block that are told, the last ones."""
MAX_OWNERS = 8
"""Owners of a block that are named."""


class BlockTables:
    """The tables that share a block: after the fork, when one must write into it, and when that one has a copy."""

    name = "block_tables"
    title = "BlockTables"
    question = "When is a shared block copied, and who pays?"
    folds = ()

    def __init__(self) -> None:
        self._copies: WeakKeyDictionary[History, Copies] = WeakKeyDictionary()
        self._latest: WeakKeyDictionary[History, tuple[int, Picture]] = WeakKeyDictionary()
        """The copy that was drawn last, by its position."""

    def picture(self, history: History, position: int, look: Look = WHOLE) -> Picture:
        """The latest copy at or before ``position``; without one, up to four tables as they are."""
        copies = self._copies.setdefault(history, Copies())
        found = copies.latest(history, position)
        swapped = host_strip.lines(history.state_at(position))
        if found is None:
            return _tables_now(history.state_at(position)) | {"swapped": swapped}
        at, total = found
        drawn = self._latest.get(history)
        if drawn is None or drawn[0] != at:
            story = copies.before(history, at, lambda state, record, written: _story(state, record, written, total))
            drawn = self._latest[history] = at, story
        return drawn[1] | {"swapped": swapped}

    def svg(self, picture: Picture, palette: Palette) -> str:
        """The panels side by side, and the tokens of the copied block below."""
        return draw(picture, palette)


# ---------------------------------------------------------------------- the three panels


def _story(state: State, record: StepRecord, copies: list[tuple[int, BlockCopy]], total: int) -> Picture:
    """The first copy of a step; ``state`` is that of the moment before it."""
    writer_id, copy = copies[0]
    writer = state.sequences[writer_id]
    owners = state.block(copy.source).owners
    shown = [state.sequences[owner] for owner in _with(owners, writer_id)]
    copied = _in_block(state, writer, copy.index)
    written = record.num_new_tokens[record.sequence_ids.index(writer_id)]
    panels = [_panel(state, shown, copy, writer, moment, copied, written) for moment in range(3)]
    for panel, (title, note) in zip(panels, _headings(copy, writer.letter, copied, len(owners)), strict=True):
        panel |= {"title": title, "note": note}
    first = copy.index * state.block_size
    texts = writer.token_texts[first : first + copied]
    return {
        "kind": "copy",
        "caption": _caption(state, record.step, shown, copies, total),
        "step": record.step,
        "panels": panels,
        "source": copy.source,
        "target": copy.target,
        "slot": copied,
        "num_copies": len(copies),
        "total": total,
        "tokens": [readable(token) for token in texts[-MAX_TOKENS:]],
        "tokens_before": max(0, len(texts) - MAX_TOKENS),
        "next": [_next(owner, writer) for owner in shown if owner.num_computed_tokens == writer.num_computed_tokens],
        "not_shown": len(owners) - len(shown),
    }


def _with(owners: Sequence[int], writer: int) -> list[int]:
    """Up to four owners, in order of age, the writer among them."""
    first = list(owners[:MAX_TABLES])
    return first if writer in first else [*first[: MAX_TABLES - 1], writer]


def _in_block(state: State, sequence: SequenceState, index: int) -> int:
    return min(state.block_size, max(0, sequence.num_computed_tokens - index * state.block_size))


def _next(owner: SequenceState, writer: SequenceState) -> dict[str, Any]:
    """The token that an owner will put into the slot."""
    known = owner.num_computed_tokens < len(owner.token_texts)
    text = readable(owner.token_texts[owner.num_computed_tokens]) if known else "not known yet"
    return {"letter": owner.letter, "hue": owner.hue, "text": text, "writes": owner is writer}


def _panel(
    state: State, shown: list[SequenceState], copy: BlockCopy, writer: SequenceState, moment: int, copied: int, written: int
) -> dict[str, Any]:
    """Moment 0: after the fork. 1: a block is taken and copied into. 2: the writer has it and writes."""
    tables, ids = [], dict[int, None]()
    for sequence in shown:
        table = dict(state.device_blocks(sequence))
        own = sequence is writer
        if own and moment == 2:
            table[copy.index] = copy.target
        tables.append(_table(sequence, table, copy.index, hot=own and moment > 0))
        ids.update((block_id, None) for index, block_id in tables[-1]["entries"] if index != copy.index)
    first = tuple(dict.fromkeys(sequence.hue for sequence in shown))
    blocks = [_block(state, block_id, first) for block_id in ids]
    blocks.sort(key=lambda block: block["index"])
    source, target = _block(state, copy.source, first), _block(state, copy.target) | {"index": copy.index}
    if moment == 1:
        source["ring"] = "source"
        target |= {"ring": "copy", "fill": copied, "label": "copying", "hues": [writer.hue]}
    elif moment == 2:
        owners = [owner for owner in state.block(copy.source).owners if owner != writer.sequence_id]
        source |= _owned(state, owners)
        target |= {"ring": "copy", "fill": min(state.block_size, copied + written)} | _owned(state, [writer.sequence_id])
    return {"tables": tables, "blocks": [*blocks, source, target], "block_size": state.block_size, "strong": copy.index}


def _table(sequence: SequenceState, table: dict[int, int], last: int, hot: bool = False) -> dict[str, Any]:
    """A table's head, and its entry ``last``; what is left out, or on the host, shows by the indices."""
    indices = [*(index for index in range(min(HEAD, last)) if index in table), last]
    return {
        "letter": sequence.letter,
        "name": readable(sequence.name),
        "request": sequence.request_id,
        "hue": sequence.hue,
        "length": max(table) + 1,
        "entries": [[index, table[index]] for index in indices],
        "hot": last if hot else None,
    }


def _block(state: State, block_id: int, first: Sequence[int | None] = ()) -> dict[str, Any]:
    block = state.block(block_id)
    return {"id": block_id, "index": block.index, "fill": block.fill, "ring": None} | _owned(state, block.owners, first)


def _owned(state: State, owners: Sequence[int], first: Sequence[int | None] = ()) -> dict[str, Any]:
    """What a block's owners say about how it looks; the hues ``first`` come first, if they are among theirs."""
    hues = list(dict.fromkeys(state.sequences[owner].hue for owner in owners))
    hues.sort(key=lambda hue: hue not in first)
    return {
        "references": len(owners),
        "label": f"×{len(owners)}" if owners else "free",
        "hues": hues[:MAX_TABLES],
        "owners": [state.sequences[owner].letter for owner in owners[:MAX_OWNERS]],
    }


# ---------------------------------------------------------------------- words


def _headings(copy: BlockCopy, writer: str, copied: int, num_owners: int) -> list[tuple[str, str]]:
    """Title and note of each panel. With one known owner, the others are from before the log."""
    source, target = copy.source, copy.target
    take = f"So take block {target} and copy {count(copied, 'token')} into it."
    if num_owners < 2:
        return [
            (f"Block {source} is shared with sequences from before this log.", "How many they are is not known."),
            (f"{writer} must write slot {copied} of block {source}: others own it too.", take),
            ("Only one entry of one table changed.", f"{writer} writes in block {target}; the others keep block {source}."),
        ]
    return [
        (
            f"After the fork: {count(num_owners, 'table')}, one set of blocks.",
            f"Block {source} has {num_owners} references.",
        ),
        (f"{writer} must write slot {copied} of block {source}: {num_owners} own it.", take),
        (
            "Only one entry of one table changed.",
            f"{writer} writes in block {target}; block {source} keeps {count(num_owners - 1, 'reference')}.",
        ),
    ]


def _caption(
    state: State, step: int, shown: list[SequenceState], copies: list[tuple[int, BlockCopy]], total: int
) -> Caption:
    writer_id, copy = copies[0]
    writer, owners = state.sequences[writer_id], state.block(copy.source).owners
    unknown = "" if not state.truncated else " The log begins in the middle of a run: owners from before it are not known."
    stay = sum(state.blocks.count(block_id) > 1 for block_id in writer.table if block_id != copy.source)
    others = f"; {count(stay, 'other block')} of its table {'stays' if stay == 1 else 'stay'} shared" if stay else ""
    left = f" {len(shown)} of the {len(owners)} tables are drawn." if len(shown) < len(owners) else ""
    several = f"{_several(state, copies)} " if len(copies) > 1 else ""
    return [
        (f"Step {step}, the latest copy of {total} so far. A fork shares all blocks and copies none. ", False),
        (f"One write into a shared block costs one block, and its writer {writer.letter} pays it{others}.", True),
        (f" {several}Above: tables of block ids. Below: the blocks, and the tokens that they hold.{left}{unknown}", False),
    ]


def _several(state: State, copies: list[tuple[int, BlockCopy]]) -> str:
    """All copies of a step, and who writes in place since it is the last owner."""
    by_source: dict[int, list[int]] = {}
    for writer, copy in copies:
        by_source.setdefault(copy.source, []).append(writer)
    if len(by_source) > 1:
        return f"The step makes {len(copies)} copies, of {len(by_source)} blocks."
    [(source, writers)] = by_source.items()
    text = f"The step makes {len(copies)} copies of block {source}, for {names(state.sequences[w].letter for w in writers)}"
    rest = [owner for owner in state.block(source).owners if owner not in writers]
    return text + (f"; {state.sequences[rest[0]].letter}, its last owner, keeps it." if len(rest) == 1 else ".")


# ---------------------------------------------------------------------- no copy yet


def _tables_now(state: State) -> Picture:
    """Up to four tables as they are: those whose last block is shared first, then those that share others."""
    holders = [sequence for sequence in state.alive() if sequence.table]
    if state.blocks.shared:
        holders.sort(key=lambda s: (state.blocks.count(s.table[-1]) < 2, state.blocks.count(s.table[0]) < 2))
    shown = holders[:MAX_TABLES]
    picture: Picture = {"kind": "tables", "panels": [], "tokens": [], "next": []}
    if not shown:
        nothing = "No requests yet." if state.record is None else f"No sequence holds a block at step {state.record.step}."
        return picture | {"caption": [(nothing, False), (" 0 blocks were copied so far.", True)]}
    assert state.record is not None
    tables = [_table(sequence, dict(enumerate(sequence.table)), len(sequence.table) - 1) for sequence in shown]
    ids = dict.fromkeys(block_id for table in tables for _, block_id in table["entries"])
    blocks = [_block(state, block_id) for block_id in ids]
    counts = state.counts()
    title = f"{count(len(shown), 'table')} at step {state.record.step}: from a sequence's blocks, in order, to the pool's."
    note = f"{count(counts['owned'] + counts['shared'], 'block')} in use, {counts['shared']} of them shared."
    caption = [
        (f"Step {state.record.step}: {count(len(holders), 'sequence')} with blocks, {len(shown)} drawn. ", False),
        ("0 blocks were copied so far: no shared block was written yet.", True),
        (" A block is copied when one of several owners is about to write into it; the writer pays for the copy.", False),
    ]
    return picture | {
        "caption": caption,
        "panels": [
            {
                "title": title,
                "note": note,
                "tables": tables,
                "blocks": blocks,
                "block_size": state.block_size,
                "strong": None,
            }
        ],
    }


FIGURE = BlockTables()
