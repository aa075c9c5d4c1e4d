"""TextStream: from the tokens of one sample to text that can be said, up to the stop string that ends it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Self

from refimpl.sampling_params import SamplingParams
from refimpl.tokenizer.detokenizer import make_detokenizer
from refimpl.tokenizer.stop_strings import StopFinder
from refimpl.tokenizer.tokenizer import Tokenizer


class TextStream:
    """The text of one sample as its tokens arrive. What was said is never taken back.

    ``prompt`` are the token ids before the first one: its text goes on from theirs. Stop strings are looked for in its own
    text alone.
    """

    __slots__ = ("_detokenizer", "_finder", "_finished", "_min_tokens", "_new", "_num_tokens")

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, prompt: Sequence[int] = ()) -> None:
        self._detokenizer = make_detokenizer(tokenizer, params.skip_special_tokens, prompt)
        self._finder = StopFinder(params.stop, params.include_stop_str_in_output) if params.stop else None
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self._new: list[str] = []
        self._finished = False

    def append(self, token_id: int, silent: bool = False) -> str | None:
        """Take the next token; returns the stop string that its text completes. A ``silent`` token has no text."""
        self._num_tokens += 1
        return None if silent else self._say(self._detokenizer.append(token_id))

    def finish(self) -> str | None:
        """No token follows: what was held back is said, up to a stop string. Returns the one that ended the text."""
        if not self._finished:
            self._finished = True
            self._say(self._detokenizer.finish())
            if self._finder is not None:
                self._new.append(self._finder.finish())
        return self._finder.found if self._finder is not None else None

    def branch(self) -> Self:
        """Another one that goes on from here on its own, and has nothing to say yet."""
        branch = copy.copy(self)
        branch._detokenizer = self._detokenizer.branch()
        branch._finder = copy.copy(self._finder)  # the automaton is shared
        branch._new = []
        return branch

    def read(self, token_ids: list[int]) -> str:
        """Take the next tokens; the text that was said since the last call of this or of :meth:`take`."""
        if len(token_ids) == 1 and self._finder is None and not self._new:
            return self._detokenizer.append(token_ids[0])  # most of a batch, at every step
        for token_id in token_ids:
            self.append(token_id)
        return self.take()

    def take(self) -> str:
        """The text that was said since the last call."""
        new = "".join(self._new)
        self._new.clear()
        return new

    def _say(self, piece: str) -> str | None:
        """Pass a piece on, as far as stop strings allow."""
        if self._finder is not None and piece:
            piece = self._finder.append(piece, counts=self._num_tokens > self._min_tokens)
        if piece:
            self._new.append(piece)
        return self._finder.found if self._finder is not None else None
