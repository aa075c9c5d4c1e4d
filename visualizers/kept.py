"""Kept: a state in little room, from which a jump in the log starts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from refimpl.visualizers.sequence_state import SequenceState
from refimpl.visualizers.swapped import Place


@dataclass(frozen=True, slots=True)
class Kept:
    """What :meth:`refimpl.visualizers.state.State.keep` keeps."""

    config: dict[str, Any]
    numbers: dict[str, Any]
    books: dict[str, Any]
    alive: list[SequenceState]
    """Their tables are packed."""
    swapped: dict[int, tuple[Place, ...]]
    findable: Any
    """Of :meth:`refimpl.visualizers.blocks.Blocks.findable`."""
