"""All figures of one log, in the order in which a dashboard shows them."""

from __future__ import annotations

from refimpl.visualizers import batch_timeline, block_map, block_tables, latency_view, memory_view
from refimpl.visualizers.figure import Figure

ALL: tuple[Figure, ...] = (
    block_map.FIGURE,
    block_tables.FIGURE,
    batch_timeline.FIGURE,
    memory_view.FIGURE,
    latency_view.FIGURE,
)
