"""StopStrings: ends a beam where its text, with one more token, holds a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from refimpl.beam_group import Continuation, StopIds
from refimpl.tokenizer.text_stream import TextStream


class StopStrings(StopIds):
    """Endings of a search with stop strings: keeps the text of every running beam.

    A continuation is tried on a branch of its beam's text; what goes on goes on from that branch. So a token is made text
    once, however long the text is.
    """

    def __init__(self, stop_ids: frozenset[int], text: TextStream) -> None:
        super().__init__(stop_ids)
        self._texts = [text]
        """Of the running beams, best first."""
        self._tried: dict[tuple[int, int], TextStream] = {}
        """Of this step's continuations that end nothing, by beam and token."""

    def ends(self, continuation: Continuation) -> bool:
        """Whether it is a stop id, or its text completes a stop string."""
        if super().ends(continuation):
            return True
        text = self._texts[continuation.beam].branch()
        self._tried[continuation.beam, continuation.token_id] = text
        return text.append(continuation.token_id) is not None

    def go_on(self, continuations: Sequence[Continuation]) -> None:
        """These are the beams that run from here on."""
        self._texts = [self._tried[c.beam, c.token_id] for c in continuations]
        self._tried = {}
