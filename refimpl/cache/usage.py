"""How well the cache's memory is used: one function, for reports, benchmarks and pictures alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from refimpl.memory_report import CacheUsage


def cache_usage(
    tables: Mapping[int, Sequence[int]],
    num_computed_tokens: Mapping[int, int],
    *,
    block_size: int,
    num_blocks: int,
    num_free: int,
    num_cached: int,
    num_stranded: int = 0,
) -> CacheUsage:
    """Count blocks and slots of the sequences that hold ``tables``. O(sequences), and O(blocks) where any are shared."""
    used = num_blocks - num_free - num_cached
    held = sum(num_computed_tokens[sequence_id] for sequence_id in tables)
    filled = held
    if sum(map(len, tables.values())) != used:
        filled = _physically_filled(tables, num_computed_tokens, block_size)
    return CacheUsage(
        block_size=block_size,
        num_blocks=num_blocks,
        num_sequences=len(tables),
        used_blocks=used,
        cached_blocks=num_cached,
        free_blocks=num_free,
        filled_slots=filled,
        shared_slots=held - filled,
        stranded_blocks=num_stranded,
    )


def _physically_filled(tables: Mapping[int, Sequence[int]], num_computed_tokens: Mapping[int, int], block_size: int) -> int:
    """Slots that hold a token, each block counted once: by the sequence that filled most of it."""
    filled: dict[int, int] = {}
    for sequence_id, block_ids in tables.items():
        left = num_computed_tokens[sequence_id]
        for block_id in block_ids:
            filled[block_id] = max(filled.get(block_id, 0), min(block_size, max(0, left)))
            left -= block_size
    return sum(filled.values())
