"""All figures of one log, in the order in which a dashboard shows them."""

from __future__ import annotations

from typing import Any

from refimpl.visualizers import batch_timeline, block_map, block_tables, latency_view, memory_view, speculation_view
from refimpl.visualizers.figure import Figure

ALL: tuple[Figure, ...] = (
    block_map.FIGURE,
    block_tables.FIGURE,
    batch_timeline.FIGURE,
    memory_view.FIGURE,
    latency_view.FIGURE,
)
"""Those that every log has something for."""
WITH_DRAFTS: tuple[Figure, ...] = (*ALL, speculation_view.FIGURE)


def figures_of(config: dict[str, Any]) -> tuple[Figure, ...]:
    """Those of a log, by its header's ``config``."""
    return WITH_DRAFTS if config.get("num_speculative_tokens") else ALL
