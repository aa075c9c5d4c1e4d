"""Which replica serves a request: the one that has its prefix in its cache, unless it is too busy; else the least busy.

A key stands for how a prompt begins: a hash over its first blocks' token ids and its salt, by the keys of the prefix cache
itself, which are the same in every process. Rendezvous hashing (Thaler and Ravishankar 1998) gives each key an order of all
replicas: every replica has a score for the key, and the highest comes first. So a key stays where it is as long as its first
replica lives, and when one dies, its keys alone move, spread over all others.

Many requests of one prefix must not bury one replica. As in consistent hashing with bounded loads (Mirrokni, Thorup and
Zadimoghaddam 2018), no replica takes more than :data:`BOUND` times its even share: the next in the key's order does.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence

from refimpl.cache.chained_hash import block_key, root_key

PREFIX_BLOCKS = 4
"""Blocks that a key is made over, or as many as the prompt fills. With more, prompts that share a beginning and go on
differently would be torn apart; with fewer, all that share a short instruction would have one key."""
BOUND = 1.25
"""A replica's load over the mean, at most."""
SLACK = 8
"""Requests that a replica may have whatever the mean is: with few requests, nobody has to go elsewhere."""


def prefix_key(
    token_ids: Sequence[int], block_size: int, salt: str | None = None, blocks: int = PREFIX_BLOCKS
) -> bytes | None:
    """The key of a prompt's first full blocks; None if it fills none, so that nothing of it can be found in a cache.

    The last token is always computed, so a block that it ends is never found either.
    """
    full = min(blocks, (len(token_ids) - 1) // block_size)
    if full < 1:
        return None
    key = root_key(salt)
    for number in range(full):
        key = block_key(key, token_ids[number * block_size : (number + 1) * block_size])
    return key


def preference(key: bytes, replicas: Sequence[str]) -> list[str]:
    """The replicas in a key's order. Taking one away leaves the order of the others as it is."""
    return sorted(replicas, key=lambda name: (_score(key, name), name), reverse=True)


def _score(key: bytes, name: str) -> bytes:
    return hashlib.blake2b(name.encode(), key=key, digest_size=8, person=b"refimpl dp").digest()


def choose(key: bytes | None, loads: Mapping[str, int]) -> str:
    """The replica for a request.

    Args:
        key: of its prefix.
        loads: unfinished requests of each replica that lives; not empty.

    """
    least = min(loads, key=lambda name: (loads[name], name))
    if key is None:
        return least
    most = max(SLACK, math.ceil(BOUND * (sum(loads.values()) + 1) / len(loads)))
    return next((name for name in preference(key, list(loads)) if loads[name] < most), least)
