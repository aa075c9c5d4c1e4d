"""Swap space: blocks of host memory, and where the blocks of sequences that were swapped out are.

A victim's blocks go to the host and come back later, bit for bit, instead of being computed again (Kwon et al. 2023, section
4.5). A block that a running sequence uses too stays on the device, held by the swapped one; as soon as all of its owners are
swapped it goes as well, once, and all their tables point to the one host block. So forked siblings, which are victims one
after the other, keep what they share::

    table of A (swapped)   host 3 │ host 4 │ device 9      9 is held: B, which runs, uses it
    table of B (running)                     device 9      B is swapped → 9 goes to host 5, in both tables
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import msgspec


class Place(msgspec.Struct, frozen=True, gc=False):
    """Where one logical block of a swapped sequence is."""

    block_id: int
    on_host: bool


@dataclass(frozen=True)
class SwapOut:
    """What swapping a sequence out moves and frees."""

    transfers: list[tuple[int, int]] = field(default_factory=list)
    """(device block, host block) to copy before anything of the step is written."""
    released: list[int] = field(default_factory=list)
    """Device blocks that nobody uses any more."""


class SwapSpace:
    """The host blocks ``1 … num_blocks``, and the tables of the sequences whose blocks are here."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks, 0, -1))
        self._tables: dict[int, list[Place]] = {}
        self._ref_counts: dict[int, int] = {}
        self._held: Counter[int] = Counter()
        """How many swapped sequences hold each device block."""

    def __contains__(self, sequence_id: int) -> bool:
        return sequence_id in self._tables

    @property
    def num_swapped(self) -> int:
        """Sequences that are swapped out."""
        return len(self._tables)

    @property
    def num_free(self) -> int:
        """Host blocks that nobody uses."""
        return len(self._free)

    @property
    def free_ids(self) -> tuple[int, ...]:
        """The free host blocks, in order of their number."""
        return tuple(sorted(self._free))

    @property
    def ref_counts(self) -> dict[int, int]:
        """In how many tables each host block is."""
        return dict(self._ref_counts)

    @property
    def tables(self) -> dict[int, tuple[Place, ...]]:
        """The tables of all swapped sequences, by sequence id."""
        return {sequence_id: tuple(places) for sequence_id, places in self._tables.items()}

    @property
    def holders(self) -> list[int]:
        """Sequences that hold blocks on the device though they are swapped out, in the order in which they were."""
        return [s for s, places in self._tables.items() if any(not place.on_host for place in places)]

    def to_move(self, block_ids: Iterable[int], ref_counts: Mapping[int, int] | list[int]) -> list[int]:
        """Those of a running sequence's blocks that no other running sequence uses."""
        return [block_id for block_id in block_ids if ref_counts[block_id] - self._held[block_id] == 1]

    def put(self, sequence_id: int, block_ids: list[int], moving: list[int]) -> list[tuple[int, int]]:
        """Take a sequence's table. ``moving`` go to host blocks (there is room), the others are held on the device."""
        host = {block_id: self._free.pop() for block_id in moving}
        for block_id, host_id in host.items():
            self._ref_counts[host_id] = self._held.pop(block_id, 0) + 1
        for places in self._tables.values():  # siblings that held a block which goes now
            for index, place in enumerate(places):
                if not place.on_host and place.block_id in host:
                    places[index] = Place(host[place.block_id], True)
        self._tables[sequence_id] = [Place(host.get(b, b), b in host) for b in block_ids]
        self._held.update(b for b in block_ids if b not in host)
        return list(host.items())

    def places(self, sequence_id: int) -> list[Place]:
        """The table of a swapped sequence."""
        return self._tables[sequence_id]

    def owners(self, place: Place) -> int:
        """Swapped sequences that have a block in their tables."""
        return self._ref_counts[place.block_id] if place.on_host else self._held[place.block_id]

    def take(self, sequence_id: int, device_ids: Iterator[int]) -> tuple[list[int], list[tuple[int, int]]]:
        """Bring a sequence back: each of its host blocks goes to the next of ``device_ids``, for all who share it.

        Returns its table of device blocks, and the transfers (host block, device block).
        """
        restored = {place.block_id: next(device_ids) for place in self._tables[sequence_id] if place.on_host}
        table = [restored[p.block_id] if p.on_host else p.block_id for p in self._tables.pop(sequence_id)]
        self._held.subtract(table)  # of those that come back now it is not counted yet
        for host_id, device_id in restored.items():
            self._held[device_id] += self._ref_counts.pop(host_id)
            self._free.append(host_id)
        for places in self._tables.values():
            for index, place in enumerate(places):
                if place.on_host and place.block_id in restored:
                    places[index] = Place(restored[place.block_id], False)
        self._held = +self._held
        return table, list(restored.items())

    def drop(self, sequence_id: int) -> list[int]:
        """Forget a sequence's blocks. Returns the device blocks that it held, last first."""
        held = []
        for place in reversed(self._tables.pop(sequence_id)):
            if not place.on_host:
                held.append(place.block_id)
                self._held[place.block_id] -= 1
            elif self._ref_counts[place.block_id] > 1:
                self._ref_counts[place.block_id] -= 1
            else:
                del self._ref_counts[place.block_id]
                self._free.append(place.block_id)
        self._held = +self._held
        return held
