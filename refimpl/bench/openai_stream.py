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

import httpx
import msgspec

from refimpl.bench.request_times import RequestTimes

Clock = Callable[[], float]


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


class _Failed(Exception):  # noqa: N818 - a way out, with the class of the error and what was said
    def __init__(self, kind: str, message: str) -> None:
        self.kind, self.message = kind, message


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
        self.model = model
        self.chat = chat
        self.clock = clock
        self._more = body or {}
        self._client = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx.Timeout(timeout, connect=min(timeout, 30.0)),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=60.0),
            trust_env=False,  # a proxy's delays would be taken for the server's
        )

    async def __aenter__(self) -> OpenAIStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def models(self) -> list[str]:
        """The names of the models that the server has.

        Raises:
            httpx.HTTPError: it cannot be reached, or refuses.

        """
        reply = await self._client.get(f"{self.base}/models")
        reply.raise_for_status()
        return [one["id"] for one in reply.json()["data"]]

    async def ask(self, prompt: str | list[int], output: int, due: float) -> Answer:
        """Send a request, read its answer to the end, and tell when what came. Errors are told, not raised."""
        sent = self.clock()
        answer = Answer(due, sent, RequestTimes(sent))
        try:
            await self._read(self._body(prompt, output), answer)
        except _Failed as failed:
            answer.error, answer.message = failed.kind, failed.message
        except httpx.HTTPError as error:
            answer.error, answer.message = _kind(error), str(error) or type(error).__name__
        answer.ended = self.clock()
        return answer

    def _body(self, prompt: str | list[int], output: int) -> dict[str, Any]:
        asked = {"messages": [{"role": "user", "content": prompt}]} if self.chat else {"prompt": prompt}
        fixed = {"model": self.model, "max_tokens": output, "temperature": 0.0, "stream": True}
        return asked | fixed | {"stream_options": {"include_usage": True}} | self._more

    async def _read(self, body: dict[str, Any], answer: Answer) -> None:
        path = "/chat/completions" if self.chat else "/completions"
        async with self._client.stream("POST", self.base + path, json=body) as reply:
            if reply.status_code != 200:
                raise _Failed(f"http {reply.status_code}", (await reply.aread()).decode(errors="replace")[:500])
            done, rest = False, b""
            async for data in reply.aiter_raw():
                now = self.clock()
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    if line.startswith(b"data:"):
                        done = self._event(line[5:].strip(), now, answer) or done
        if not done and answer.finish_reason is None:
            raise _Failed("disconnected", f"the stream ended after {answer.times.tokens} pieces, without a finish_reason")

    def _event(self, data: bytes, now: float, answer: Answer) -> bool:
        """Take an event in; whether it is the last one."""
        if data == b"[DONE]":
            return True
        try:
            event = msgspec.json.decode(data, type=_Event)
        except msgspec.MsgspecError as error:
            raise _Failed("protocol", f"{error}: {data[:200]!r}") from error
        if event.error:
            raise _Failed("stream", str(event.error)[:500])
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


def _kind(error: httpx.HTTPError) -> str:
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return "connect"
    if isinstance(error, httpx.TimeoutException):
        return "timeout"
    return "disconnected" if isinstance(error, httpx.TransportError) else "protocol"
