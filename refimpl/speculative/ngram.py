"""Prompt lookup: the draft is what followed the last few tokens where they stood before (Saxena 2023).

It costs no model, and is right wherever a text repeats one: quoting, editing, renaming in code, answering from a document::

    the cat sat on the mat . the cat sat
    └──┬──────┘ └────┬────┘  └───┬─────┘
    its match   the draft    the suffix of n tokens

The longest suffix counts, from ``max_n`` down to ``min_n`` tokens: more context in common, more often the same continuation.
Of matches of one length the most recent counts, since a text that was edited so far goes on as its edited part did: after
a rename the new name is the draft, where the leftmost match would bring the old one at each occurrence. A recent match may
stand so near the end that fewer than k tokens follow it; then the copy goes on in what it has copied itself, as in LZ77
(Ziv and Lempel 1977), which continues a list or a loop by its period.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from refimpl.errors import ConfigError

RECENT = 4096
"""Tokens that are searched before all of them are."""


def propose(token_ids: Sequence[int] | NDArray[np.integer], k: int, min_n: int, max_n: int) -> list[int]:
    """Up to ``k`` tokens that may follow ``token_ids``: exactly ``k`` where a suffix has an earlier match, else none.

    Args:
        token_ids: the whole sequence so far, prompt and output, [T]. An integer array is read as it is; a list is copied
            first, which takes longer than the search.
        k: most tokens wanted.
        min_n: the fewest tokens that a match has in common with the end of the sequence.
        max_n: the most that are compared.

    Raises:
        ConfigError: not ``1 <= min_n <= max_n``.

    """
    check_lengths(min_n, max_n)
    tokens = np.asarray(token_ids)
    if k < 1 or len(tokens) <= min_n:
        return []
    start = _continuation(tokens, min_n, max_n)
    if start is None:
        return []
    period: list[int] = tokens[start : start + k].tolist()
    return (period * -(-k // len(period)))[:k]


def check_lengths(min_n: int, max_n: int) -> None:
    """Refuse lengths between which no suffix lies.

    Raises:
        ConfigError: not ``1 <= min_n <= max_n``.

    """
    if not 1 <= min_n <= max_n:
        raise ConfigError(f"prompt lookup compares {min_n} to {max_n} tokens; it must be 1 <= min <= max")


def _continuation(tokens: NDArray[np.integer], min_n: int, max_n: int) -> int | None:
    """Where the text after the best earlier match begins.

    A match of ``max_n`` tokens among the recent ones cannot be bettered; a text that repeats itself has one there, and
    many more before. Else all tokens are looked at.
    """
    last = len(tokens) - 1
    for oldest in (max(0, last - RECENT), 0):
        length, end = _longest_match(tokens[oldest:], max_n)
        if length == max_n or (length >= min_n and oldest == 0):
            return oldest + end
    return None


def _longest_match(tokens: NDArray[np.integer], max_n: int) -> tuple[int, int]:
    """The longest suffix of at most ``max_n`` tokens that stands earlier too: its length, and where its last match ends.

    One look at the whole array finds the places of the last token; each further token is looked up at the places that are
    left, and they soon are few.
    """
    last = len(tokens) - 1
    ends = np.flatnonzero(tokens[:last] == tokens[last])
    if not len(ends):
        return 0, 0
    length = 1
    while length < max_n:
        longer = ends[np.searchsorted(ends, length) :]  # before the first token there is none
        longer = longer[tokens[longer - length] == tokens[last - length]]
        if not len(longer):
            break
        ends, length = longer, length + 1
    return length, int(ends[-1]) + 1
