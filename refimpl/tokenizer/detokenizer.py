"""Detokenizer: the text of one sample as its tokens arrive."""

from __future__ import annotations

import re

from refimpl.tokenizer.tokenizer import Tokenizer

UNFINISHED = "\ufffd"
"""What decoding shows for bytes that are no character, or not yet."""
BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")
"""A byte where a SentencePiece vocabulary has no token for a character."""


class Detokenizer:
    """Turns ids into text piece by piece; the pieces joined are what decoding all ids at once gives.

    A piece is held back while later tokens could change it: when it ends within a character, and after a byte token, since
    a run of those is decoded together. Each decoding sees the tokens of the piece before it, because a token at the start
    of a text may lose its leading space::

        settled text      │ the last piece   │ held back
        ──────────────────┼──────────────────┼────────────
                          context            unsettled      end of _token_ids
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._token_ids: list[int] = []
        self._context = 0
        self._unsettled = 0
        self._context_text = ""
        self.text = ""
        """The text so far."""

    def append(self, token_id: int) -> None:
        """Take the next token. Ids without text (skipped, or outside the tokenizer's vocabulary) leave all as it is."""
        token = self._tokenizer.backend.id_to_token(token_id)
        if token is None or token_id in self._skipped:
            return
        self._token_ids.append(token_id)
        if BYTE_TOKEN.fullmatch(token):
            return
        piece = self._held_back()
        if piece and not piece.endswith(UNFINISHED):
            self.text += piece
            self._context, self._unsettled = self._unsettled, len(self._token_ids)
            self._context_text = self._decode(self._context)

    def finish(self) -> None:
        """Nothing follows: bytes that never became a character are shown as decoding the whole shows them."""
        self.text += self._held_back()
        self._context = self._unsettled = len(self._token_ids)
        self._context_text = ""

    def _held_back(self) -> str:
        return self._decode(self._context)[len(self._context_text) :]

    def _decode(self, start: int) -> str:
        return self._tokenizer.decode(self._token_ids[start:], skip_special_tokens=False)
