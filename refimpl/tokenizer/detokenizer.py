"""Detokenizer: the text of one sample as its tokens arrive.

tokenizers has this as ``DecodeStream``, and it is not used. It has no end, so what it still holds back then is lost. It
decodes everything that it holds back again with each token: 4,000 bytes that are no UTF-8 take it seconds, as the square of
their number. And where bytes stand for missing tokens (SentencePiece's byte fallback) it shows a character that a later
byte spoils, and then raises. The two ways below hold back what later tokens could change and nothing else, and do the same
work for each token.
"""

from __future__ import annotations

import codecs
import copy
from collections.abc import Sequence
from typing import Protocol, Self

from refimpl.tokenizer.tokenizer import Tokenizer

UNFINISHED = "\ufffd"
"""What decoding shows for bytes that are no character, or not yet."""
LONGEST_WINDOW = 16
"""Tokens that are decoded together at most, where none of them is a byte token."""
CONTEXT = 4
"""Tokens before a piece that are enough to decode it: a character that is not complete has at most three bytes."""


class Detokenizer(Protocol):
    """Turns ids into text piece by piece.

    The text of the prompt, without a character that it breaks off in, followed by the pieces, is what decoding prompt and
    output at once gives. So an output goes on with a space where its first token has one, and with a whole character where
    the prompt ended within it.
    """

    def append(self, token_id: int) -> str:
        """Take the next token; the text that is certain with it. Ids that the tokenizer does not know have none."""

    def finish(self) -> str:
        """Nothing follows: what was held back, as decoding the whole shows it."""

    def branch(self) -> Self:
        """Another one that goes on from here on its own."""


def make_detokenizer(tokenizer: Tokenizer, skip_special_tokens: bool, prompt: Sequence[int] = ()) -> Detokenizer:
    """The way that fits the tokenizer; ``prompt`` are the tokens before the first one."""
    skipped = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
    kind = ByteLevelDetokenizer if tokenizer.is_byte_level else WindowDetokenizer
    return kind(tokenizer, skipped, prompt)


class ByteLevelDetokenizer:
    """For vocabularies of bytes (GPT-2's kind, and most since): each token is a few bytes, whatever stands beside it.

    Held back are the bytes, three at most, of a character that is not complete.
    """

    __slots__ = ("_bytes_of", "_pending", "_skipped", "_whole")

    def __init__(self, tokenizer: Tokenizer, skipped: frozenset[int], prompt: Sequence[int]) -> None:
        self._bytes_of = tokenizer.token_bytes
        self._whole = tokenizer.whole_text
        self._skipped = skipped
        self._pending = b""
        tail = b""
        for token_id in reversed(prompt):
            if len(tail) >= CONTEXT:
                break
            tail = (b"" if token_id in skipped else self._bytes_of(token_id)) + tail
        self._decode(tail)

    def append(self, token_id: int) -> str:
        """Take the next token; the characters that are complete with it."""
        if token_id in self._skipped:
            return ""
        if not self._pending and (text := self._whole(token_id)) is not None:
            return text  # nearly always
        return self._decode(self._bytes_of(token_id))

    def finish(self) -> str:
        """U+FFFD for a character that never became complete."""
        return self._decode(b"", final=True)

    def branch(self) -> Self:
        """Another one that goes on from here on its own."""
        return copy.copy(self)

    def _decode(self, data: bytes, final: bool = False) -> str:
        data = self._pending + data
        text, used = codecs.utf_8_decode(data, "replace", final)
        self._pending = data[used:]
        return text


class WindowDetokenizer:
    """For all other vocabularies: decodes a window of the last tokens, and takes what is new at its end.

    A token may look different at the start of a text (without its leading space), so the window always begins with a token
    that came before. Held back are byte tokens until their run ends, since one bad byte changes what is shown for all of
    it, and, where a decoder joins bytes, a U+FFFD at the end, which may be the start of a character::

        said already                    │ held back
        … ─────┬────────────────────────┼────────────
               window                   said          end of _window
    """

    def __init__(self, tokenizer: Tokenizer, skipped: frozenset[int], prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._byte_tokens = tokenizer.byte_token_ids
        self._window: list[int] = []
        self._said = 0
        """Characters of the decoded window that were handed out, or are the prompt's."""
        begin, room = len(prompt), LONGEST_WINDOW // 2
        while begin and room:
            begin -= 1
            room -= prompt[begin] not in self._byte_tokens and self._has_text(prompt[begin])
        for token_id in prompt[begin:]:
            self.append(token_id)

    def append(self, token_id: int) -> str:
        """Take the next token; the text that is certain with it."""
        if not self._has_text(token_id):
            return ""
        self._window.append(token_id)
        if token_id in self._byte_tokens:
            return ""
        text = self._decode(self._window)
        # Only a U+FFFD that a decoder made of the start of a character may still change.
        held_back = int(self._tokenizer.joins_bytes and text.endswith(UNFINISHED))
        piece, self._said = text[self._said : len(text) - held_back], len(text) - held_back
        if (piece and not held_back) or len(self._window) > LONGEST_WINDOW:
            self._window = self._window[-CONTEXT if held_back else -1 :]
            self._said = len(self._decode(self._window)) - held_back
        return piece

    def finish(self) -> str:
        """What was held back."""
        piece = self._decode(self._window)[self._said :]
        self._window, self._said = [], 0
        return piece

    def branch(self) -> Self:
        """Another one that goes on from here on its own."""
        branch = copy.copy(self)
        branch._window = list(self._window)
        return branch

    def _has_text(self, token_id: int) -> bool:
        return token_id not in self._skipped and self._tokenizer.backend.id_to_token(token_id) is not None

    def _decode(self, token_ids: list[int]) -> str:
        if len(token_ids) == 1:
            return self._tokenizer.token_text(token_ids[0])
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)
