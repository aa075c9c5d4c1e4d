"""SequenceState: one sequence at one moment of a log."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Phase = Literal["waiting", "running", "preempted", "swapped", "padding", "finished"]
NUM_HUES = 8
NEUTRAL = NUM_HUES
"""The hue of the ninth request alive at once, and of all beyond: told apart by letter alone."""


@dataclass(slots=True)
class SequenceState:
    """One sequence as the log tells it."""

    sequence_id: int
    request_id: str
    family: int
    """The first sequence of its request: an id can be used again, this number is not."""
    letter: str
    """A short name for small cells: the request's letter, and ``·1`` for its second sample."""
    name: str
    """The name that people gave it: the request's id, and ``/1`` for its second sample."""
    num_prompt_tokens: int
    texts: list[str]
    """Of tokens, as many as any state of the log has come to know: states share this list, which only grows."""
    num_tokens: int
    """How many are known at this moment."""
    arrived_at: float
    """Seconds of the log."""
    arrived_step: int
    phase: Phase = "waiting"
    hue: int | None = None
    """0 to 7, or ``NEUTRAL``; None before its first block."""
    slot: int | None = None
    table: list[int] = field(default_factory=list)
    """Of one that is swapped, none: see ``State.swapped``."""
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    parent: int | None = None
    finish_reason: str | None = None

    @property
    def num_output_tokens(self) -> int:
        """Output tokens that are known."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def token_texts(self) -> list[str]:
        """The texts of all tokens that are known."""
        return self.texts[: self.num_tokens]

    @property
    def ended(self) -> bool:
        """Whether nothing more comes of it for its user."""
        return self.phase in ("finished", "padding")
