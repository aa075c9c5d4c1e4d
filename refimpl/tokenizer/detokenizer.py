"""Detokenizer: the text of one sample as its tokens arrive."""

from __future__ import annotations

import tokenizers

from refimpl.tokenizer.tokenizer import Tokenizer


class Detokenizer:
    """Turns ids into text piece by piece: a character spread over several tokens comes when its last token does."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._stream = tokenizers.decoders.DecodeStream(skip_special_tokens=skip_special_tokens)
        self._token_ids: list[int] = []
        self.text = ""
        """The text so far."""

    def append(self, token_id: int) -> None:
        """Take the next token."""
        self._token_ids.append(token_id)
        self.text += self._stream.step(self._tokenizer.backend, token_id) or ""

    def finish(self) -> None:
        """Nothing follows: bytes that never became a character are shown as decoding the whole shows them."""
        whole = self._tokenizer.decode(self._token_ids, self._skip_special_tokens)
        if whole.startswith(self.text):
            self.text = whole
