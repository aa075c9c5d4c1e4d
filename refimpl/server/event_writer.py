"""EventWriter: chunks of a reply as server-sent events. What all chunks share is encoded once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from refimpl.server.exchange import DONE, Exchange
from refimpl.server.generation import Generation
from refimpl.server.protocol import StreamOptions

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True)
class ReplyHead:
    """What stands in every reply."""

    id: str
    object: str
    created: int
    model: str


class EventWriter:
    """Writes the events of one stream."""

    def __init__(self, exchange: Exchange, head: ReplyHead, options: StreamOptions | None, generation: Generation) -> None:
        self._exchange = exchange
        self._generation = generation
        self._usage = options is not None and bool(options.include_usage)
        self._running_usage = options is not None and bool(options.continuous_usage_stats)
        common = _encode({"id": head.id, "object": head.object, "created": head.created, "model": head.model})
        self._begin = b"data: " + common[:-1] + b',"choices":['
        self._end = b'],"usage":null}\n\n' if self._usage else b"]}\n\n"

    async def tell(self, choices: Sequence[msgspec.Struct]) -> None:
        """A chunk for each choice, sent as one piece."""
        begin, end = self._begin, self._with_usage() if self._running_usage else self._end
        await self._exchange.events(b"".join([begin + _encode(choice) + end for choice in choices]))

    async def finish(self) -> None:
        """The usage, where it was asked for, and the end."""
        usage = self._begin + self._with_usage() if self._usage else b""
        await self._exchange.events(usage + DONE, last=True)

    def _with_usage(self) -> bytes:
        return b'],"usage":' + _encode(self._generation.usage()) + b"}\n\n"
