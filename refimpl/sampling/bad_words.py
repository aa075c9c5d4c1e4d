"""Bad words: texts that a request never generates, whatever tokens they are written with."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from refimpl.kernels.transfer import to_device
from refimpl.tokenizer.tokenizer import Tokenizer

ANY = -1
"""In front of a word that has fewer tokens than the longest: every token fits."""
_NOTHING = -2
"""In front of a sequence's first token: no token is this, but ``ANY`` fits it."""
_BEFORE = ","
"""A text after which a tokenizer writes words as in the middle of a text."""


def ways_to_write(text: str, tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """How a tokenizer writes a text: with a space before it and without, at the start of a text and in the middle of one.

    A word is often one token with its space and several without, or the other way round; and some tokenizers put a space
    before every text. Each way that stands for the text counts, whatever its length.
    """
    before = tokenizer.encode(_BEFORE, add_special_tokens=False)
    ways: dict[tuple[int, ...], None] = {}
    for form in (text, f" {text}"):
        alone = tokenizer.encode(form, add_special_tokens=False)
        within = tokenizer.encode(_BEFORE + form, add_special_tokens=False)
        ways[tuple(alone)] = None
        if within[: len(before)] == before:
            ways[tuple(within[len(before) :])] = None
    wanted = text.strip()
    # A tokenizer without tokens for a text writes something else: that is not the bad word.
    return [way for way in ways if way and wanted in tokenizer.decode(way, skip_special_tokens=False)]


@dataclass(frozen=True)
class WordTable:
    """Bad words of more than one token, as tensors: ``W`` of them, the longest of ``K + 1`` tokens."""

    heads: Int64[Tensor, "W K"]
    """All tokens of a word but its last, right-aligned, ``ANY`` before them."""
    lasts: Int64[Tensor, "W"]

    @classmethod
    def of(cls, words: list[tuple[int, ...]], device: torch.device) -> WordTable | None:
        """The table of the words that have several tokens; None if there are none."""
        words = [word for word in words if len(word) > 1]
        if not words:
            return None
        longest = max(map(len, words)) - 1
        heads = [[ANY] * (longest - len(word) + 1) + list(word[:-1]) for word in words]
        return cls(to_device(torch.tensor(heads), device), to_device(torch.tensor([word[-1] for word in words]), device))

    def widened(self, width: int) -> Int64[Tensor, "W K2"]:
        """The heads with ``ANY`` before them up to a width."""
        return torch.nn.functional.pad(self.heads, (width - self.heads.shape[1], 0), value=ANY)


def tails(token_ids: Int64[Tensor, "R L"], num_tokens: Int64[Tensor, "R"], width: int) -> Int64[Tensor, "R K"]:
    """The last ``width`` tokens of each row; what lies before a row's first is no token."""
    places = num_tokens.unsqueeze(-1) - width + torch.arange(width, device=token_ids.device)
    return token_ids.gather(-1, places.clamp(min=0)).masked_fill(places < 0, _NOTHING)


def forbid_last_tokens(
    logits: Float[Tensor, "R V"],
    rows: Int64[Tensor, "W"],
    heads: Int64[Tensor, "W K"],
    lasts: Int64[Tensor, "W"],
    tail: Int64[Tensor, "R K"],
) -> Float[Tensor, "R V"]:
    """Minus infinity for the last token of each word whose others have just been written. Word ``w`` is of row ``rows[w]``.

    What was written may be the prompt's end or the output. The argument is not changed.
    """
    written = ((heads == ANY) | (heads == tail[rows])).all(-1)
    # Added, not set: two words of a row may end alike, and only one of them may be written so far.
    minus = torch.where(written, -math.inf, 0.0).to(logits.dtype)
    return logits.index_put((rows, lasts), minus, accumulate=True)
