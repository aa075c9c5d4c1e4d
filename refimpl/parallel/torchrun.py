"""Ranks that torchrun has started, on one machine or several: who is which, and how they find rank 0.

torchrun gives every process its number and the address of a store that all of them see. That store asks nobody who he is, so
it tells where rank 0 listens and nothing else: who connects there proves that he knows the token of the environment.
"""

from __future__ import annotations

import os
import socket
from typing import Any

from refimpl.errors import ConfigError

TOKEN = "REFIMPL_TOKEN"  # noqa: S105 - the name of a variable
"""The environment variable with the secret that all ranks share: hexadecimal digits."""
LEAST_DIGITS = 32
PORT = "refimpl-port"


def started_here() -> bool:
    """Whether torchrun started this process, to be a rank of refimpl's: else there is no token."""
    return all(name in os.environ for name in (TOKEN, "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def first_rank(size: int) -> tuple[socket.socket, bytes, Any]:
    """Where rank 0 listens, the token, and the store.

    Raises:
        ConfigError: torchrun started another number of ranks, or there is no token.

    """
    if os.environ["WORLD_SIZE"] != str(size):
        raise ConfigError(f"tensor_parallel_size is {size}, but torchrun started {os.environ['WORLD_SIZE']} ranks")
    token, store = _token(), _store()
    listener = socket.create_server((os.environ["MASTER_ADDR"], 0), backlog=size)
    store.set(PORT, str(listener.getsockname()[1]))
    return listener, token, store


def other_rank() -> tuple[int, tuple[str, int], bytes, Any]:
    """The number of this rank, where rank 0 listens, the token, and the store. Waits for rank 0.

    Raises:
        ConfigError: there is no token.

    """
    token, store = _token(), _store()
    return int(os.environ["RANK"]), (os.environ["MASTER_ADDR"], int(store.get(PORT))), token, store


def ranks_here(size: int) -> int:
    """How many of all ``size`` ranks torchrun has started on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", size))


def _store() -> Any:
    from torch.distributed.rendezvous import rendezvous

    return next(rendezvous("env://"))[0]


def _token() -> bytes:
    text = os.environ.get(TOKEN, "")
    try:
        token = bytes.fromhex(text)
    except ValueError:
        token = b""
    if 2 * len(token) < LEAST_DIGITS:
        raise ConfigError(
            f"ranks that torchrun starts need a secret in the environment variable {TOKEN}, the same on every machine: at "
            f"least {LEAST_DIGITS} hexadecimal digits, as `openssl rand -hex 16` prints"
        )
    return token
