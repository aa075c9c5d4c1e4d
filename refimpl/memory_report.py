"""What the memory holds: CacheUsage, the KV cache at one moment, and MemoryReport, which puts bytes and weights to it.

On a GPU the report also divides the whole card, part by part, and says what each setting would change.
"""

from __future__ import annotations

from typing import Protocol

import msgspec


class CacheUsage(msgspec.Struct, frozen=True):
    """The KV cache at one moment. Blocks and slots of tokens; ``used + cached + free`` is the whole pool."""

    block_size: int
    """Token slots in a block."""
    num_blocks: int
    num_sequences: int
    """Sequences that hold blocks."""
    used_blocks: int
    """In the tables of sequences, shared ones counted once."""
    cached_blocks: int
    """Kept by the prefix cache, used by no sequence: given back when room is needed."""
    free_blocks: int
    filled_slots: int
    """Slots of used blocks that hold a token."""
    shared_slots: int
    """Filled slots that sequences would need besides, if none were shared."""
    stranded_blocks: int
    """Free, and yet of no use: contiguous reservations do not fit there."""

    @property
    def wasted_slots(self) -> int:
        """Slots in used blocks that hold nothing: waste inside, at most ``block_size - 1`` a sequence where it is paged."""
        return self.used_blocks * self.block_size - self.filled_slots

    @property
    def waste(self) -> float:
        """The share of the used slots that hold nothing."""
        return self.wasted_slots / (self.used_blocks * self.block_size) if self.used_blocks else 0.0


class MemoryPart(msgspec.Struct, frozen=True):
    """A part of a device's memory."""

    name: str
    num_bytes: int
    note: str


class SettingChange(msgspec.Struct, frozen=True):
    """What one setting, changed alone, would make of the KV cache."""

    setting: str
    """As it would be given, ``max_num_seqs=128``."""
    num_blocks: int
    more_tokens: int
    """Token slots more than now; fewer, below 0."""


class HoldsMemory(Protocol):
    """What an executor says of its memory."""

    device_name: str
    weight_bytes: int
    block_bytes: int

    @property
    def memory_parts(self) -> tuple[MemoryPart, ...]:
        """The device's memory, part by part."""

    @property
    def setting_changes(self) -> tuple[SettingChange, ...]:
        """What other settings would make of the cache."""


class MemoryReport(msgspec.Struct, frozen=True):
    """Weights and KV cache in bytes, and the same requests in a contiguous cache beside it. ``print`` shows a table."""

    device: str
    weight_bytes: int
    block_bytes: int
    """Of one block over all layers."""
    max_model_len: int
    """What a contiguous cache reserves for each sequence, in tokens."""
    usage: CacheUsage
    parts: tuple[MemoryPart, ...] = ()
    """On a GPU, where its memory goes; the last is the whole, the sum of the others."""
    changes: tuple[SettingChange, ...] = ()
    """On a GPU whose cache was sized by what was free: what other settings would make of it."""

    @classmethod
    def of(cls, holder: HoldsMemory, max_model_len: int, usage: CacheUsage) -> MemoryReport:
        """The report of an executor's memory, used so."""
        sizes = holder.weight_bytes, holder.block_bytes
        return cls(holder.device_name, *sizes, max_model_len, usage, holder.memory_parts, holder.setting_changes)

    @property
    def pool_bytes(self) -> int:
        """Bytes of the whole KV cache, taken when the engine starts: paging changes how many sequences fit, not this."""
        return self.usage.num_blocks * self.block_bytes

    @property
    def contiguous_bytes(self) -> int:
        """Bytes that a cache with one reservation of ``max_model_len`` a sequence would take for the same sequences."""
        return self.usage.num_sequences * self._blocks(self.max_model_len) * self.block_bytes

    def sequences_that_fit(self, num_tokens: int) -> tuple[int, int]:
        """Sequences of ``num_tokens`` tokens that the pool holds: paged, and with one reservation each."""
        pool = self.usage.num_blocks
        return pool // self._blocks(num_tokens), pool // self._blocks(self.max_model_len)

    def _blocks(self, num_tokens: int) -> int:
        return max(1, -(-num_tokens // self.usage.block_size))

    def __str__(self) -> str:
        usage = self.usage
        rows = [
            ("weights", self.weight_bytes, ""),
            ("KV cache, reserved", self.pool_bytes, f"{usage.num_blocks:,} blocks of {usage.block_size} tokens"),
            (
                "  used",
                usage.used_blocks * self.block_bytes,
                f"{usage.used_blocks:,} blocks, {usage.num_sequences} sequences",
            ),
            ("    holding tokens", self._slot_bytes(usage.filled_slots), f"{usage.filled_slots:,} tokens"),
            ("    wasted inside", self._slot_bytes(usage.wasted_slots), f"{usage.waste:.1%} of the used slots"),
            ("  cached prefixes", usage.cached_blocks * self.block_bytes, f"{usage.cached_blocks:,} blocks"),
            ("  free", usage.free_blocks * self.block_bytes, f"{usage.free_blocks:,} blocks"),
            ("saved by sharing", self._slot_bytes(usage.shared_slots), f"{usage.shared_slots:,} tokens"),
            ("the same, contiguous", self.contiguous_bytes, f"{self.max_model_len:,} tokens reserved a sequence"),
            ("would fit in the pool", self.pool_bytes, self._fitting()),
        ]
        if usage.stranded_blocks:
            rows.insert(7, ("    wasted outside", usage.stranded_blocks * self.block_bytes, "too short for a reservation"))
        lines = _table(self.device, rows)
        if self.parts:
            lines += ["", *_table("where the memory goes", [(part.name, part.num_bytes, part.note) for part in self.parts])]
        if self.changes:
            lines += ["", *self._other_settings()]
        return "\n".join(lines)

    def _other_settings(self) -> list[str]:
        changes = [
            (change.setting, f"{change.num_blocks:,} blocks", f"{change.more_tokens:+,} tokens") for change in self.changes
        ]
        return ["with another setting", *(f"  {setting:<32}{blocks:>18}{more:>22}" for setting, blocks, more in changes)]

    def _fitting(self) -> str:
        """How many sequences as long as those that run now; of the longest, while none does."""
        usage = self.usage
        tokens = -(-(usage.filled_slots + usage.shared_slots) // usage.num_sequences) if usage.num_sequences else 0
        paged, contiguous = self.sequences_that_fit(tokens or self.max_model_len)
        return f"{paged:,} sequences of {tokens or self.max_model_len:,} tokens; contiguous, {contiguous:,}"

    def _slot_bytes(self, slots: int) -> int:
        return slots * self.block_bytes // self.usage.block_size


def _table(title: str, rows: list[tuple[str, int, str]]) -> list[str]:
    """Names, MiB and notes in columns."""
    lines = [f"{title:<22}{'MiB':>10}"]
    return lines + [f"{name:<22}{count / 1024**2:>10,.1f}   {note}".rstrip() for name, count, note in rows]
