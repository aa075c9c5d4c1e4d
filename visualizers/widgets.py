"""The widgets that people make: each a view with its figures. ``BlockMap(llm)`` as a cell's last line shows it, live."""

from __future__ import annotations

from typing import Any

from refimpl.visualizers import batch_timeline, block_map, block_tables, latency_view, memory_view, speculation_view
from refimpl.visualizers.batching import Batching
from refimpl.visualizers.figures import WITH_DRAFTS, figures_of
from refimpl.visualizers.source import player_for
from refimpl.visualizers.view import View


class BlockMap(View):
    """Which sequence owns this block?"""

    figures = (block_map.FIGURE,)


class BlockTables(View):
    """When is a shared block copied, and who pays?"""

    figures = (block_tables.FIGURE,)


class BatchTimeline(View):
    """Why did this request wait?"""

    figures = (batch_timeline.FIGURE,)


class MemoryView(View):
    """Where did the memory go, and how much of it holds tokens?"""

    figures = (memory_view.FIGURE,)


class LatencyView(View):
    """How long to the first word, and how steady after it?"""

    figures = (latency_view.FIGURE,)


class SpeculationView(View):
    """Are the drafts worth it: how many are accepted, and what does a round bring?"""

    figures = (speculation_view.FIGURE,)


class Dashboard(View):
    """All of them together, on one step of one log; those about drafts where tokens are drafted."""

    figures = WITH_DRAFTS

    def __init__(self, source: Any, **options: Any) -> None:
        source = player_for(source)
        self.figures = figures_of(source.history.config)
        super().__init__(source, **options)


class StaticAndContinuous(View):
    """What does waiting for the longest answer cost? Two runs of the same requests, whole and side by side.

    Args:
        static: the LLM, engine or log of the run with ``scheduler="static"``.
        continuous: that of the other one.

    """

    figures = (Batching({}),)
    with_transport = False

    def __init__(self, static: Any, continuous: Any, **options: Any) -> None:
        self._static = player_for(static)
        histories = {"static": self._static.history, "continuous": player_for(continuous).history}
        self.figures = (Batching(histories),)
        super().__init__(continuous, **options)
        self._stop_listening_to_static = self._static.listen(self._draw)

    def _send_frame(self, whole: bool) -> None:
        self._static.catch_up()
        super()._send_frame(whole)

    def _repr_html_(self) -> str:
        """Both runs as HTML without a script."""
        self._static.catch_up()
        return super()._repr_html_()

    def close(self) -> None:
        """Take the widget off the page and let both logs go."""
        self._stop_listening_to_static()
        super().close()
