"""MemoryView: where did the memory go, and how much of it holds tokens? The pool twice: reserved whole, and in blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from refimpl.visualizers import host_strip
from refimpl.visualizers.figure import WHOLE, Caption, Look, Picture, count
from refimpl.visualizers.history import History
from refimpl.visualizers.memory_view_svg import draw
from refimpl.visualizers.palette import Palette
from refimpl.visualizers.sequence_state import SequenceState
from refimpl.visualizers.state import State
from refimpl.visualizers.words import names, percent, size

MAX_HUES = 4
Holder = Sequence[Any]
"""One segment of a bar: letter, request id, hue, slots that hold a token, slots held, owners.

Where there are several owners, a list of their request ids, and one of their hues."""
Shared = tuple[int, int, tuple[int, ...]]
"""An entry of a table, the block that stands there, and the block's owners."""


class MemoryView:
    """Weights and KV pool; then what runs, in a contiguous cache and in a paged one of the same size."""

    name = "memory_view"
    title = "MemoryView"
    question = "Where did the memory go, and how much of it holds tokens?"
    folds = ()

    def picture(self, history: History, position: int, look: Look = WHOLE) -> Picture:
        """The bars, their numbers, and ``usage``: the same counts as ``Engine.memory_report`` gives."""
        state = history.state_at(position)
        holding = [one for one in state.alive() if one.table or state.num_device_blocks(one)]
        sequences = [sequence for sequence in holding if sequence.table]
        holders, usage = _usage(state, holding)
        reserves = bool(history.config.get("reserved_blocks"))
        run = max(1, -(-history.config["max_model_len"] // state.block_size))
        fit = min(len(sequences), state.num_blocks // run)
        contiguous = _contiguous(state, sequences, run, fit)
        paged = _as_if_paged(state, sequences) if reserves else _paged(state, holders, usage, len(sequences))
        contiguous["note"], paged["note"] = _notes(reserves, run * state.block_size)
        memory = _bytes(history.config, state)
        return {
            "caption": _caption(state, usage, memory, sequences, fit, run, reserves),
            "memory": memory,
            "usage": usage,
            "slots": (state.num_blocks + 1) * state.block_size,
            "null": state.block_size,
            "bars": [contiguous, paged],
            "fit": fit,
            "scale": _scale(state, memory),
        }

    def svg(self, picture: Picture, palette: Palette) -> str:
        """The bars one above the other."""
        return draw(picture, palette)


# ---------------------------------------------------------------------- counting


def _usage(state: State, sequences: Sequence[SequenceState]) -> tuple[list[Holder], dict[str, int]]:
    """What the tables hold, each shared block once. O(sequences and entries of tables that are shared)."""
    shared = _shared(state)
    holders: list[Holder] = []
    seen = 0
    for sequence in sequences:
        held = state.num_device_blocks(sequence) * state.block_size
        tokens = min(sequence.num_computed_tokens, held)  # of a swapped one, those in the head of its table
        seen += tokens
        if sequence.sequence_id in shared:
            holders += _holders(state, sequence, shared[sequence.sequence_id], tokens, held)
        else:
            holders.append((sequence.letter, sequence.request_id, sequence.hue, tokens, held, 1))
    counts = state.counts()
    used = counts["owned"] + counts["shared"]
    filled = sum([holder[3] for holder in holders])
    return holders, {
        "num_sequences": len(sequences),
        "used_blocks": used,
        "cached_blocks": counts["cached"],
        "free_blocks": counts["free"],
        "filled_slots": filled,
        "wasted_slots": used * state.block_size - filled,
        "shared_slots": seen - filled,
    }


def _shared(state: State) -> dict[int, list[Shared]]:
    """By sequence, its shared blocks in order."""
    found: dict[int, list[Shared]] = {}
    for block_id, owners in state.shared_blocks(state.num_blocks):
        for owner in owners:
            found.setdefault(owner, []).append((state.blocks.index(block_id), block_id, owners))
    for entries in found.values():
        entries.sort()
    return found


def _holders(state: State, sequence: SequenceState, shared: list[Shared], filled: int, held: int) -> list[Holder]:
    """The shared blocks of which the sequence is the oldest owner, by who the others are, and its own ones."""
    size = state.block_size
    groups: dict[tuple[int, ...], list[Any]] = {}
    for index, block_id, owners in shared:
        filled -= min(size, max(0, sequence.num_computed_tokens - index * size))
        held -= size
        if owners[0] == sequence.sequence_id:
            if owners not in groups:
                groups[owners] = _group(state, owners)
            group = groups[owners]
            group[3] += state.block(block_id).fill
            group[4] += size
    own = (sequence.letter, sequence.request_id, sequence.hue, filled, held, 1)
    return [*groups.values(), own] if held else [*groups.values()]


def _group(state: State, owners: tuple[int, ...]) -> list[Any]:
    together = [state.sequences[owner] for owner in owners]
    requests = list(dict.fromkeys(sequence.request_id for sequence in together))
    hues = list(dict.fromkeys(sequence.hue for sequence in together))[:MAX_HUES]
    letters = names(sequence.letter for sequence in together)
    return [letters, requests, hues, 0, 0, len(owners)]


def _bytes(config: dict[str, Any], state: State) -> dict[str, Any] | None:
    """Bytes, or None for a run without a model, and for a log that has none."""
    block = config.get("block_bytes") or 0
    if not block:
        return None
    weights, pool = config.get("weight_bytes") or 0, state.num_blocks * block
    return {
        "device": str(config.get("device") or "this device"),
        "weight_bytes": weights,
        "pool_bytes": pool,
        "block_bytes": block,
        "total_bytes": weights + pool + block,
        "labels": [f"weights {size(weights)}", f"KV pool {size(pool)}"],
        "title": f"All {size(weights + pool + block)}",
    }


# ---------------------------------------------------------------------- the bars


def _contiguous(state: State, sequences: Sequence[SequenceState], run: int, fit: int) -> dict[str, Any]:
    """Reservations of ``run`` blocks for as many as fit, oldest first; a rest that is too short for another is lost."""
    reserved, pool = run * state.block_size, state.num_blocks * state.block_size
    holders = [(s.letter, s.request_id, s.hue, s.num_computed_tokens, reserved, 1) for s in sequences[:fit]]
    room = state.num_blocks // run - fit
    stranded = state.num_blocks % run * state.block_size
    tokens = sum(sequence.num_computed_tokens for sequence in sequences[:fit])
    left_out = names(sequence.letter for sequence in sequences[fit:])
    numbers = [f"{percent(tokens, pool)} holds tokens", f"{percent(fit * reserved - tokens, pool)} reserved and empty"]
    if room:
        numbers.append(f"{percent(room * reserved, pool)} free, room for {room:,} more")
    if stranded:
        numbers.append(f"{percent(stranded, pool)} too short for another {reserved:,}")
    numbers.append(f"{fit:,} fit{', no room for ' + left_out if left_out else ''}")
    rest = [["free", room * reserved, f"room for {room:,} more"], ["stranded", stranded, "too short"]]
    return {"title": "Contiguous", "numbers": numbers, "holders": holders, "rest": [part for part in rest if part[1]]}


def _paged(state: State, holders: list[Holder], usage: dict[str, int], num_sequences: int) -> dict[str, Any]:
    """Blocks as they are held, shared ones once; then cached prefixes, then what is free."""
    pool = state.num_blocks * state.block_size
    cached, free = usage["cached_blocks"] * state.block_size, usage["free_blocks"] * state.block_size
    numbers = [
        f"{percent(usage['filled_slots'], pool)} holds tokens",
        f"{percent(usage['wasted_slots'], pool)} empty inside last blocks",
    ]
    numbers += [f"{percent(cached, pool)} cached, may be taken"] if cached else []
    numbers += [f"{percent(free, pool)} free"] if free else []
    numbers.append(f"{num_sequences:,} run{'s' if num_sequences == 1 else ''}")
    rest = [["cached", cached, f"cached prefixes {cached:,}"], ["free", free, f"free {free:,}"]]
    return {"title": "Paged", "numbers": numbers, "holders": holders, "rest": [part for part in rest if part[1]]}


def _as_if_paged(state: State, sequences: Sequence[SequenceState]) -> dict[str, Any]:
    """The sequences of a run that reserves, in blocks as their tokens need them."""
    holders: list[Holder] = []
    for sequence in sequences:
        tokens, blocks = sequence.num_computed_tokens, -(-sequence.num_computed_tokens // state.block_size)
        holders.append((sequence.letter, sequence.request_id, sequence.hue, tokens, blocks * state.block_size, 1))
    filled, held = sum(holder[3] for holder in holders), sum(holder[4] for holder in holders)
    free = state.num_blocks - held // state.block_size
    usage = {"filled_slots": filled, "wasted_slots": held - filled, "cached_blocks": 0, "free_blocks": free}
    return _paged(state, holders, usage, len(sequences))


def _notes(reserves: bool, reserved: int) -> tuple[str, str]:
    if reserves:
        return f"as this engine runs, {reserved:,} slots for each", "computed for the same sequences"
    return f"computed for the same sequences, {reserved:,} slots for each", "as this engine runs"


# ---------------------------------------------------------------------- words


def _caption(
    state: State,
    usage: dict[str, int],
    memory: dict[str, Any] | None,
    sequences: Sequence[SequenceState],
    fit: int,
    run: int,
    reserves: bool,
) -> Caption:
    parts: Caption = []
    if memory:
        weights, pool = memory["labels"]
        parts += [(f"On {memory['device']}, ", False), (f"{weights}, {pool}", True), (". ", False)]
    share = percent(usage["filled_slots"], state.num_blocks * state.block_size)
    if not sequences:
        where = "No requests yet" if state.record is None else f"No sequence holds blocks at step {state.record.step}"
        cached = f", {usage['cached_blocks']:,} keep prefixes that may be taken" if usage["cached_blocks"] else ""
        free = f"{usage['free_blocks']:,} of {count(state.num_blocks, 'block')} are free{cached}"
        parts += [(f"{where}: ", False), (free, True), (".", False)]
    else:
        assert state.record is not None
        parts += _who(state.record.step, len(sequences), fit, run * state.block_size, reserves)
        parts += [(f"{share} of the pool holds tokens", True), (".", False)]
        if reserves:
            needed = sum(-(-sequence.num_computed_tokens // state.block_size) for sequence in sequences)
            parts.append((f" Paged, they would take {needed:,} of its {count(state.num_blocks, 'block')}.", False))
        if usage["shared_slots"]:
            filled = usage["filled_slots"]
            seen = f"{filled + usage['shared_slots']:,} tokens of the sequences stand in {filled:,} slots."
            parts.append((f" Shared blocks are drawn once: {seen}", False))
    parts += host_strip.told(state)
    if state.truncated:
        parts.append((" The log begins in the middle of a run: what ran before is not shown.", False))
    return parts


def _who(step: int, running: int, fit: int, reserved: int, reserves: bool) -> Caption:
    """How many fit, one way and the other."""
    if reserves:
        return [(f"At step {step} this run reserves {reserved:,} slots for each of {count(running, 'sequence')}: ", False)]
    all_run = "it runs" if running == 1 else f"all {running:,} run"
    return [
        (f"At step {step}, in the same pool: contiguous reserves {reserved:,} slots for each sequence, so ", False),
        (f"{fit:,} of {running:,} fit", True),
        ("; paged takes blocks as they fill, so ", False),
        (all_run, True),
        (", and ", False),
    ]


def _scale(state: State, memory: dict[str, Any] | None) -> str:
    """What a token and a block take, and how long the bars are."""
    spans = f"the bars span {(state.num_blocks + 1) * state.block_size:,} slots, the null block's among them"
    if memory is None:
        return f"a block has {count(state.block_size, 'slot')}; {spans}"
    block = memory["block_bytes"]
    return f"a token is {block // state.block_size:,} B, a block of {state.block_size} is {size(block)}; {spans}"


FIGURE = MemoryView()
