"""What is told of single tokens: their texts and bytes, where they stand in the text, and their log-probabilities."""

from __future__ import annotations

from collections.abc import Iterable

from refimpl.logprobs import Logprob
from refimpl.server.replies import ChatLogprob, ChatLogprobs, CompletionLogprobs, TopLogprob
from refimpl.tokenizer.detokenizer import make_detokenizer
from refimpl.tokenizer.tokenizer import Tokenizer

Logprobs = list[dict[int, Logprob]]


class TokenNames:
    """How a request wants its tokens written: as texts, or (``return_tokens_as_token_ids``) as ``token_id:17``."""

    def __init__(self, tokenizer: Tokenizer, as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def text(self, token_id: int) -> str:
        """The token on its own; what is part of a character is U+FFFD."""
        return f"token_id:{token_id}" if self._as_ids else self._tokenizer.token_text(token_id)

    def key(self, token_id: int) -> str:
        r"""The same, but that parts of characters differ: OpenAI's ``bytes:\xe2\x82``."""
        if not self._as_ids and self._tokenizer.is_byte_level and self._tokenizer.whole_text(token_id) is None:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self._tokenizer.token_bytes(token_id))
        return self.text(token_id)

    def bytes(self, token_id: int) -> list[int]:
        """The token's bytes, as far as the vocabulary tells them."""
        if self._tokenizer.is_byte_level:
            return list(self._tokenizer.token_bytes(token_id))
        return list(self._tokenizer.token_text(token_id).encode())


class Offsets:
    """Where each token of a text begins in it, in characters. A token within a character stands at its start.

    Tokens whose text a stop string took away stand where it would have been.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool, before: list[int], at: int = 0) -> None:
        self._detokenizer = make_detokenizer(tokenizer, skip_special_tokens, before)
        self.at = at

    def of(self, token_ids: Iterable[int]) -> list[int]:
        """The offsets of the next tokens."""
        offsets = []
        for token_id in token_ids:
            offsets.append(self.at)
            self.at += len(self._detokenizer.append(token_id))
        return offsets


def completion_logprobs(
    token_ids: list[int], found: list[dict[int, Logprob] | None], offsets: list[int], names: TokenNames
) -> CompletionLogprobs:
    """The four lists of a completion; of a first token of a prompt there is no log-probability."""
    return CompletionLogprobs(
        text_offset=offsets,
        token_logprobs=[
            None if one is None else one[token_id].logprob for token_id, one in zip(token_ids, found, strict=True)
        ],
        tokens=[names.key(token_id) for token_id in token_ids],
        top_logprobs=[None if one is None else {names.key(i): each.logprob for i, each in one.items()} for one in found],
    )


def chat_logprobs(token_ids: list[int], found: Logprobs, num_top: int, names: TokenNames) -> ChatLogprobs:
    """Those of an answer, each token with so many of the most probable ones, best first."""
    content = []
    for token_id, one in zip(token_ids, found, strict=True):
        best = sorted(one.items(), key=lambda item: item[1].rank)[:num_top]
        top = [TopLogprob(names.text(i), each.logprob, names.bytes(i)) for i, each in best]
        content.append(ChatLogprob(names.text(token_id), one[token_id].logprob, names.bytes(token_id), top))
    return ChatLogprobs(content)
