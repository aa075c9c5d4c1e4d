"""Swapped: where the blocks of preempted sequences are that were not given up, folded from a log's transfers.

A swapped sequence holds some of its blocks on the device, those that a running one uses too; the others are in host blocks.
When the last running user of a held block is swapped out, it goes to the host for all who hold it; when one of several comes
back, what they share is on the device again for all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from refimpl.visualizers.blocks import Blocks


class Place(NamedTuple):
    """Where one logical block of a swapped sequence is."""

    block_id: int
    on_host: bool


class Swapped:
    """The tables of swapped sequences, by sequence id. What they hold on the device stays theirs in ``blocks``."""

    def __init__(self, blocks: Blocks) -> None:
        self.tables: dict[int, list[Place]] = {}
        self._blocks = blocks
        self._host: Counter[int] = Counter()
        """In how many tables each host block is."""

    def __contains__(self, sequence_id: int) -> bool:
        return sequence_id in self.tables

    @property
    def num_used(self) -> int:
        """Host blocks in use."""
        return len(self._host)

    def owners(self) -> dict[int, list[int]]:
        """The sequences of each host block in use, in order of age; by host block."""
        found: dict[int, list[int]] = {host_id: [] for host_id in sorted(self._host)}
        for sequence_id in sorted(self.tables):
            for place in self.tables[sequence_id]:
                if place.on_host:
                    found[place.block_id].append(sequence_id)
        return found

    def held(self, sequence_id: int) -> list[tuple[int, int]]:
        """(index in its table, device block) of what a swapped sequence holds; none if it is not swapped."""
        places = self.tables.get(sequence_id, ())
        return [(index, place.block_id) for index, place in enumerate(places) if not place.on_host]

    def on_host(self, sequence_id: int) -> list[tuple[int, int]]:
        """(index in its table, host block) of what a swapped sequence has there; none if it is not swapped."""
        places = self.tables.get(sequence_id, ())
        return [(index, place.block_id) for index, place in enumerate(places) if place.on_host]

    def put(self, sequence_id: int, table: Sequence[int], moved: Mapping[int, int]) -> None:
        """A sequence that owns the blocks of ``table`` is swapped out; ``moved`` are a step's transfers, to host blocks."""
        places = self.tables[sequence_id] = [Place(block_id, False) for block_id in table]
        self._move_out(sequence_id, places, moved)

    def move_out(self, moved: Mapping[int, int]) -> None:
        """What sequences hold goes with another's blocks: (device block to host block)."""
        for sequence_id, places in self.tables.items() if moved else ():
            self._move_out(sequence_id, places, moved)

    def _move_out(self, sequence_id: int, places: list[Place], moved: Mapping[int, int]) -> None:
        for index, place in enumerate(places):
            if not place.on_host and place.block_id in moved:
                self._blocks.disown(sequence_id, (place.block_id,))
                places[index] = Place(moved[place.block_id], True)
                self._host[moved[place.block_id]] += 1

    def move_in(self, restored: Mapping[int, int]) -> None:
        """Host blocks come back, for all who share them: (host block to device block)."""
        for sequence_id, places in self.tables.items() if restored else ():
            for index, place in enumerate(places):
                if place.on_host and place.block_id in restored:
                    places[index] = Place(restored[place.block_id], False)
                    self._blocks.own(sequence_id, (restored[place.block_id],), index)
        for host_id in restored:
            self._host.pop(host_id, None)

    def drop(self, sequence_id: int) -> None:
        """A sequence gives all of its blocks up, wherever they are. Nothing happens if it is not swapped."""
        for place in self.tables.pop(sequence_id, ()):
            if not place.on_host:
                self._blocks.disown(sequence_id, (place.block_id,))
            elif self._host[place.block_id] > 1:
                self._host[place.block_id] -= 1
            else:
                del self._host[place.block_id]

    def keep(self) -> dict[int, tuple[Place, ...]]:
        """All of it, to be given to ``take``."""
        return {sequence_id: tuple(places) for sequence_id, places in self.tables.items()}

    def take(self, kept: Mapping[int, Sequence[Place]]) -> None:
        """Begin with what was kept."""
        for sequence_id, places in kept.items():
            self.tables[sequence_id] = list(places)
            self._host.update(place.block_id for place in places if place.on_host)
            for index, block_id in self.held(sequence_id):
                self._blocks.own(sequence_id, (block_id,), index)
