"""From whatever people have to a log: an LLM, an engine, a log, or the path of a saved one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from refimpl.errors import RefimplError
from refimpl.events import EventLog
from refimpl.visualizers.player import Player, player_of


def log_of(source: Any) -> EventLog:
    """A source's event log. A file that was cut in its last record is read up to there, with a warning.

    Raises:
        RefimplError: it is none of these, records nothing, or the file is no log.

    """
    if isinstance(source, str | Path):
        return EventLog.load(source, partial=True)
    events = source if isinstance(source, EventLog) else getattr(engine_of(source), "events", None)
    if not isinstance(events, EventLog):
        raise RefimplError(
            f"a log is that of an LLM or an Engine, an EventLog, or a file; this is a {type(source).__name__}"
        )
    return events


def engine_of(source: Any) -> Any:
    """The engine of an LLM, or the engine itself."""
    return getattr(source, "engine", source)


def player_for(source: Any) -> Player:
    """The player of a source's log.

    Raises:
        RefimplError: it has no log, or records nothing.

    """
    if isinstance(source, Player):
        return source
    events = log_of(source)
    if events.records.maxlen == 0:
        raise RefimplError("this engine records nothing (event_log_size=0), so there is nothing to show; leave it out")
    return player_of(events, None if isinstance(source, str | Path | EventLog) else engine_of(source))
