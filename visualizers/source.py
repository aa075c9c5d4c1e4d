"""From whatever a widget is given to the player of its log: an LLM, an engine, a log, or the path of a saved one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from refimpl.errors import RefimplError
from refimpl.events import EventLog
from refimpl.visualizers.player import Player, player_of


def player_for(source: Any) -> Player:
    """The player of a source's log.

    Raises:
        RefimplError: it is none of these, records nothing, or the file is no log.

    """
    if isinstance(source, Player):
        return source
    if isinstance(source, str | Path):
        return player_of(EventLog.load(source))
    if isinstance(source, EventLog):
        return player_of(source)
    engine = getattr(source, "engine", source)
    events = getattr(engine, "events", None)
    if not isinstance(events, EventLog):
        raise RefimplError(
            f"a widget shows an LLM, an Engine, an EventLog, or the path of a saved log; this is a {type(source).__name__}"
        )
    if events.records.maxlen == 0:
        raise RefimplError("this engine records nothing (event_log_size=0), so there is nothing to show; leave it out")
    return player_of(events, engine)
