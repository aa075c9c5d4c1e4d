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
    from refimpl.visualizers.history import History
    from refimpl.visualizers.state import State
    from refimpl.visualizers.widgets import BlockMap

_HOMES = {
    "BlockMap": "widgets",
    "History": "history",
    "State": "state",
}

__all__ = ["BlockMap", "History", "State"]


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
