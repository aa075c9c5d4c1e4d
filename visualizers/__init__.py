"""Live widgets, drawn from the event log of the running engine, or from a saved one.

>>> from refimpl.visualizers import BlockMap  # doctest: +SKIP
>>> BlockMap(llm)  # doctest: +SKIP

Names are loaded when they are first used: reading logs needs no widget library. Widgets need ``pip install
"refimpl[notebooks]"``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from refimpl.visualizers.attention_view import AttentionView
    from refimpl.visualizers.export import export_perfetto, record, replay
    from refimpl.visualizers.history import History
    from refimpl.visualizers.page import export_html
    from refimpl.visualizers.state import State
    from refimpl.visualizers.terminal import render
    from refimpl.visualizers.watch import watch
    from refimpl.visualizers.widgets import (
        BatchTimeline,
        BlockMap,
        BlockTables,
        Dashboard,
        LatencyView,
        MemoryView,
        SpeculationView,
        StaticAndContinuous,
    )

_HOMES = {
    "AttentionView": "attention_view",
    "BatchTimeline": "widgets",
    "BlockMap": "widgets",
    "BlockTables": "widgets",
    "Dashboard": "widgets",
    "History": "history",
    "LatencyView": "widgets",
    "MemoryView": "widgets",
    "SpeculationView": "widgets",
    "State": "state",
    "StaticAndContinuous": "widgets",
    "export_html": "page",
    "export_perfetto": "export",
    "record": "export",
    "render": "terminal",
    "replay": "export",
    "watch": "watch",
}

__all__ = [
    "AttentionView",
    "BatchTimeline",
    "BlockMap",
    "BlockTables",
    "Dashboard",
    "History",
    "LatencyView",
    "MemoryView",
    "SpeculationView",
    "State",
    "StaticAndContinuous",
    "export_html",
    "export_perfetto",
    "record",
    "render",
    "replay",
    "watch",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'refimpl.visualizers' has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(f"refimpl.visualizers.{_HOMES[name]}"), name)
    except ModuleNotFoundError as error:
        if error.name in ("anywidget", "ipywidgets", "traitlets", "plotly"):
            raise ImportError(f'{name} needs {error.name}: pip install "refimpl[notebooks]"') from error
        raise


def __dir__() -> list[str]:
    return sorted(__all__)
