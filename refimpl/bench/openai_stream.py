"""One streamed request to a server that speaks OpenAI's protocol, and when its pieces came.

A piece is an event with text in it. Servers may put several tokens into one (drafts that were accepted, or a reader who was
slow), so the number of tokens is the server's own, from the ``usage`` that ends a stream; where there is none, the pieces
are counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import msgspec

from refimpl.bench.http_stream import Head, HttpClient, HttpError, Take
from refimpl.bench.request_times import RequestTimes

Clock = Callable[[], float]
MOST_SAID = 500
"""Characters that are kept of what a server says about an error."""


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    @property
    def has_text(self) -> bool:
        delta = self.delta
        return bool(self.text or (delta and (delta.content or delta.reasoning_content or delta.reasoning)))


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


@dataclass
class Answer:
    """What came of a request. Times are seconds of the clock that it was sent by."""

    due: float
    """When it should have been sent."""
    sent: float
    times: RequestTimes
    """Of its tokens; the arrival is ``sent``."""
    gaps: list[float] = field(default_factory=list)
    """Between neighbouring pieces."""
    ended: float = 0.0
    prompt_tokens: int = 0
    counted_by_server: bool = False
    """Whether ``times.tokens`` is the server's number."""
    finish_reason: str | None = None
    error: str | None = None
    """Its class: connect, timeout, http 503, disconnected, stream, protocol; None if it was answered."""
    message: str = ""
    """Of the error."""

    @property
    def whole(self) -> float:
        """Seconds from sending to the end (end to end)."""
        return self.ended - self.sent


class OpenAIStream:
    """Asks one server. As a context it holds the connections, which are kept open between requests.

    Args:
        url: the server, with or without ``/v1``.
        model: its name there.
        chat: use ``/chat/completions`` in place of ``/completions``.
        api_key: sent as a bearer token.
        timeout: seconds without a byte until a request is given up.
        body: more fields of every request.

    """

    def __init__(
        self,
        url: str,
        model: str = "",
        chat: bool = False,
        api_key: str | None = None,
        timeout: float = 600.0,
        body: dict[str, Any] | None = None,
        clock: Clock = time.perf_counter,
    ) -> None:
        self.base = url.rstrip("/").removesuffix("/v1") + "/v1"
        self._path = urlsplit(self.base).path
        self.model = model
        self.chat = chat
        self.clock = clock
        self._more = body or {}
        self._client = HttpClient(url, {"Authorization": f"Bearer {api_key}"} if api_key else {}, timeout, clock)

    async def __aenter__(self) -> OpenAIStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._client.close()

    async def models(self) -> list[str]:
        """The names of the models that the server has.

        Raises:
            HttpError: it cannot be reached, or does not say.

        """
        status, body = await self._client.whole("GET", f"{self._path}/models")
        if status != 200:
            raise HttpError(f"http {status}", body.decode(errors="replace")[:MOST_SAID])
        try:
            return [one.id for one in msgspec.json.decode(body, type=_Models).data]
        except msgspec.MsgspecError as error:
            raise HttpError("protocol", f"{error}: {body[:200]!r}") from error

    async def ask(self, prompt: str | list[int], output: int, due: float) -> Answer:
        """Send a request, read its answer to the end, and tell when what came. Errors are told, not raised."""
        sent = self.clock()
        answer = Answer(due, sent, RequestTimes(sent))
        try:
            await self._read(self._body(prompt, output), answer)
        except HttpError as error:
            answer.error, answer.message = error.kind, str(error)
        answer.ended = self.clock()
        return answer

    def _body(self, prompt: str | list[int], output: int) -> dict[str, Any]:
        asked = {"messages": [{"role": "user", "content": prompt}]} if self.chat else {"prompt": prompt}
        fixed = {"model": self.model, "max_tokens": output, "temperature": 0.0, "stream": True}
        return asked | fixed | {"stream_options": {"include_usage": True}} | self._more

    async def _read(self, body: dict[str, Any], answer: Answer) -> None:
        path = f"{self._path}/{'chat/completions' if self.chat else 'completions'}"
        said: list[bytes] = []
        done, rest = False, b""

        def take(now: float, data: bytes) -> None:
            nonlocal done, rest
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                if line.startswith(b"data:"):
                    done = self._event(line[5:].strip(), now, answer) or done

        def started(head: Head) -> Take:
            return take if head.status == 200 else lambda _now, data: said.append(data)

        head = await self._client.request("POST", path, started, msgspec.json.encode(body))
        if head.status != 200:
            raise HttpError(f"http {head.status}", b"".join(said).decode(errors="replace")[:MOST_SAID])
        if not done and answer.finish_reason is None:
            raise HttpError("disconnected", f"the stream ended after {answer.times.tokens} pieces, without a finish_reason")

    def _event(self, data: bytes, now: float, answer: Answer) -> bool:
        """Take an event in; whether it is the last one."""
        if data == b"[DONE]":
            return True
        try:
            event = msgspec.json.decode(data, type=_Event)
        except msgspec.MsgspecError as error:
            raise HttpError("protocol", f"{error}: {data[:200]!r}") from error
        if event.error:
            raise HttpError("stream", str(event.error)[:MOST_SAID])
        for choice in event.choices:
            ends = choice.finish_reason is not None
            if choice.has_text or (ends and answer.times.first is None):  # tokens without a text, up to the end
                self._piece(now, answer)
            answer.finish_reason = choice.finish_reason or answer.finish_reason
        if event.usage is not None:
            answer.prompt_tokens = event.usage.prompt_tokens
            if event.usage.completion_tokens is not None:
                answer.counted_by_server, answer.times.tokens = True, event.usage.completion_tokens
        return False

    @staticmethod
    def _piece(now: float, answer: Answer) -> None:
        if answer.times.last is not None:
            answer.gaps.append(now - answer.times.last)
        answer.times.came(now, 1)
