"""The wire between the engine's process and its ranks: framed bytes over a socket, between ends that share a token.

A frame is a letter that says what it is, four bytes of length, and msgpack or text. Before any frame both ends prove that
they know the token, by a keyed hash of the other's random number: another user of the machine can connect to the port, and
gets no further. Neither end unpickles anything.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import struct
from collections.abc import Iterator

SETUP, STEP, CLOSE = b"S", b"T", b"C"
"""From the engine: what to load; a step; the end."""
BEAT, READY, FAILED = b"B", b"R", b"F"
"""From a rank: it lives, and how many collectives it has entered; it has loaded everything; it cannot go on, and why."""
MOST_BYTES = 2**28
"""Of a frame: a step that admits a thousand prompts of 16,384 tokens has a fifth of it."""
HEADER = struct.Struct(">cI")
LOOPBACK = "127.0.0.1"
RANK = struct.Struct(">I")
COUNT = struct.Struct(">Q")
NONCE = 32
HANDSHAKE_SECONDS = 5.0


class WireError(Exception):
    """The other end is no part of this engine, or it speaks another language."""


def send(connection: socket.socket, kind: bytes, payload: bytes = b"") -> None:
    """Send a frame."""
    connection.sendall(HEADER.pack(kind, len(payload)) + payload)


class Frames:
    """Frames out of the bytes that arrive."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Take bytes in; each frame that is complete.

        Raises:
            WireError: a frame is longer than any may be.

        """
        self._buffer += data
        while len(self._buffer) >= HEADER.size:
            kind, length = HEADER.unpack_from(self._buffer)
            if length > MOST_BYTES:
                raise WireError(f"a frame of {length:,} bytes was announced; {MOST_BYTES:,} are the most")
            if len(self._buffer) < HEADER.size + length:
                return
            payload = bytes(self._buffer[HEADER.size : HEADER.size + length])
            del self._buffer[: HEADER.size + length]
            yield kind, payload


def greet(connection: socket.socket, token: bytes, rank: int) -> None:
    """A rank's half of the handshake.

    Raises:
        WireError: the other end does not know the token.

    """
    connection.settimeout(HANDSHAKE_SECONDS)
    ours, theirs = os.urandom(NONCE), _receive(connection, NONCE)
    connection.sendall(RANK.pack(rank) + ours + _proof(token, b"rank", theirs + RANK.pack(rank)))
    if not hmac.compare_digest(_receive(connection, NONCE), _proof(token, b"engine", ours)):
        raise WireError("who listens there does not know this engine's token")
    connection.settimeout(None)


def admit(connection: socket.socket, token: bytes) -> int:
    """The engine's half: the number of the rank that has proved itself.

    Raises:
        WireError: the other end does not know the token.

    """
    connection.settimeout(HANDSHAKE_SECONDS)
    ours = os.urandom(NONCE)
    connection.sendall(ours)
    rank, theirs, proof = (_receive(connection, count) for count in (RANK.size, NONCE, NONCE))
    if not hmac.compare_digest(proof, _proof(token, b"rank", ours + rank)):
        raise WireError("somebody connected who does not know this engine's token")
    connection.sendall(_proof(token, b"engine", theirs))
    connection.settimeout(None)
    number: int = RANK.unpack(rank)[0]
    return number


def _proof(token: bytes, who: bytes, nonce: bytes) -> bytes:
    return hmac.new(token, who + nonce, hashlib.sha256).digest()


def _receive(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        try:
            more = connection.recv(count - len(data))
        except TimeoutError as error:
            raise WireError("the other end said nothing") from error
        if not more:
            raise WireError("the other end hung up")
        data += more
    return data
