"""The one timeline of each history, which all figures share."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from refimpl.visualizers.history import History
from refimpl.visualizers.timeline_books import CountingState
from refimpl.visualizers.timeline_rows import Timeline

_TIMELINES: WeakKeyDictionary[History, Timeline] = WeakKeyDictionary()


def timeline_of(history: History) -> Timeline:
    """The one timeline of a history, with all of its records."""
    timeline = _TIMELINES.get(history)
    if timeline is None or len(timeline) < history.first:  # new, or what it has not seen is forgotten
        base = history.base(CountingState) if history.first else None
        timeline = _TIMELINES[history] = Timeline(history.config, base, history.first)
    timeline.extend(history.records)
    timeline.forget(history.first)
    return timeline
