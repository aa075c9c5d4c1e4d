"""Randomness without state: the random number of a (seed, path, position, purpose) is a function of these four.

Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") turns a 64-bit key and a 128-bit counter
into 128 random bits. The key is the request's seed; the counter is position, purpose and the sample's 64-bit path. Nothing
is advanced, so a token's random number is the same alone, in any batch, after a preemption, and on any device.
"""

from __future__ import annotations

import enum
import hashlib
from typing import TypeVar

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF

FEW = 16
"""Numbers that a CPU works out in Python's integers: 140 operations, each of which takes torch over a microsecond."""

Words = TypeVar("Words", Int64[Tensor, "R"], int)
"""32 bits, one or a row's each in an int64."""


class Purpose(enum.IntEnum):
    """What a random number is for; each use at one position has its own."""

    TARGET = 0
    """Drawing a token from the model's distribution, or from what a rejection leaves of it."""
    DRAFT = 1
    """Drawing a token from a draft's distribution."""
    ACCEPT = 2
    """Accepting a draft."""


ROOT_PATH = 0


def branch(parent: int, index: int) -> int:
    """The 64-bit path of branch ``index`` under ``parent`` (signed, as torch stores it): sample i of n, or a fork."""
    digest = hashlib.blake2b(
        parent.to_bytes(8, "little", signed=True) + index.to_bytes(8, "little"), digest_size=8, person=b"refimpl path"
    )
    return int.from_bytes(digest.digest(), "little", signed=True)


def mix_seed(seed: int, arrival: int) -> int:
    """The seed of a request that has none: the engine's seed and the number of requests before it (64 bits, signed)."""
    digest = hashlib.blake2b(
        (seed % 2**64).to_bytes(8, "little") + arrival.to_bytes(8, "little"), digest_size=8, person=b"refimpl seed"
    )
    return int.from_bytes(digest.digest(), "little", signed=True)


def philox(counter: tuple[Words, ...], key: tuple[Words, ...]) -> tuple[Words, ...]:
    """Philox4x32-10 on rows: four counter words and two key words in, four random words out."""
    x0, x1, x2, x3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        # A product of two 32-bit words fills 64 bits: int64 wraps, but keeps every bit, so both halves are right.
        product0, product1 = x0 * _MULTIPLIERS[0], x2 * _MULTIPLIERS[1]
        high0, low0 = (product0 >> 32) & _MASK, product0 & _MASK
        high1, low1 = (product1 >> 32) & _MASK, product1 & _MASK
        x0, x1, x2, x3 = high1 ^ x1 ^ k0, low1, high0 ^ x3 ^ k1, low0
        k0, k1 = (k0 + _KEY_STEPS[0]) & _MASK, (k1 + _KEY_STEPS[1]) & _MASK
    return x0, x1, x2, x3


def uniform(
    seed: Int64[Tensor, "R"],
    path: Int64[Tensor, "R"],
    position: Int64[Tensor, "R"],
    purpose: Purpose | Int64[Tensor, "R"],
) -> Float64[Tensor, "R"]:
    """One uniform number a row, strictly between 0 and 1, from 32 random bits.

    ``position`` is the index, in its sequence, of the token that is drawn; ``purpose`` is one for all rows, or each row's.
    """
    use = purpose if isinstance(purpose, Tensor) else torch.full_like(position, int(purpose))
    if position.device.type == "cpu" and len(position) <= FEW:
        columns = (seed.tolist(), path.tolist(), position.tolist(), use.tolist())
        words = [_first_word(*row) for row in zip(*columns, strict=True)]
        word = torch.tensor(words, dtype=torch.int64)
    else:
        word = _first_word(seed, path, position, use)
    return (word.to(torch.float64) + 0.5) * 2.0**-32


def _first_word(seed: Words, path: Words, position: Words, use: Words) -> Words:
    """Of the four random words."""
    counter = (position & _MASK, use, path & _MASK, (path >> 32) & _MASK)
    return philox(counter, (seed & _MASK, (seed >> 32) & _MASK))[0]
