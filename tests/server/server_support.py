"""A server in a thread of the test's own process, with the clients that ask it."""

import asyncio
import socket
import threading
import time

import httpx
import openai

from refimpl import AsyncLLM
from refimpl.server.app import make_app
from refimpl.server.client import LocalClient
from refimpl.server.door import DoorRules
from refimpl.server.limits import Limits
from refimpl.server.runner import Listening, Runner
from refimpl.server.service import Service

ENGINE = {"dtype": "float64", "max_model_len": 512, "num_gpu_blocks_override": 256, "max_num_seqs": 64, "max_logprobs": 20}


class LiveServer:
    """uvicorn over the tiny model, on a port of its own."""

    def __init__(self, *, limits=None, rules=None, stuck_after=60.0, shutdown_timeout=5.0, names=("tiny",), **engine):
        before = set(threading.enumerate())
        self.llm = AsyncLLM("tiny", **{**ENGINE, **engine})
        self.service = Service(LocalClient(self.llm, [self.llm.engine], stuck_after), names, limits or Limits())
        self.app = make_app(self.service, rules or DoorRules())
        listening = Listening(port=0, shutdown_timeout=shutdown_timeout)
        self.socket = listening.bind()
        self.url = listening.url(self.socket)
        ready = threading.Event()
        self.runner = Runner(self.app, self.service, listening, ready.set)
        self.thread = threading.Thread(target=self.runner.run, args=([self.socket],))
        self.thread.start()
        assert ready.wait(30)
        self.threads = set(threading.enumerate()) - before
        self.http = httpx.Client(base_url=self.url, timeout=60, trust_env=False)
        self.openai = openai.OpenAI(base_url=f"{self.url}/v1", api_key="key", max_retries=0, http_client=_plain_client())

    @property
    def address(self):
        return self.socket.getsockname()[:2]

    def post(self, path, body=None, **options):
        return self.http.post(path, json=body, **options)

    def complete(self, **body):
        return self.post("/v1/completions", {"model": "tiny", **body})

    def idle(self):
        """Nothing is left of any request: none under way, no block in use, and the books are right."""
        engine = self.llm.engine
        quiet = not engine.has_unfinished_requests() and not len(self.service.in_flight)
        return quiet and engine.memory_report().usage.used_blocks == 0 and engine.audit() == []

    def close(self):
        self.http.close()
        self.openai.close()
        self.runner.stop()
        self.thread.join(30)
        assert not self.thread.is_alive()
        self.socket.close()
        self.llm.close()


def _plain_client():
    return httpx.Client(timeout=60, trust_env=False)


def until(true, seconds=60):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.005)


def events(text):
    """The data of server-sent events, as they are."""
    pieces = text.split("\n\n")
    assert pieces[-1] == ""
    assert all(piece.startswith("data: ") for piece in pieces[:-1])
    return [piece.removeprefix("data: ") for piece in pieces[:-1]]


class Raw:
    """A client that does what no HTTP library would."""

    def __init__(self, address, data=b""):
        self.socket = socket.create_connection(address, timeout=20)
        self.socket.sendall(data)

    def read_until(self, mark):
        data = b""
        while mark not in data:
            more = self.socket.recv(65536)
            if not more:
                break
            data += more
        return data

    def read_all(self):
        return self.read_until(b"\0 never")

    def vanish(self):
        """Close with a reset, as a machine that is switched off."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        self.socket.close()


def request_bytes(path, body, **headers):
    """An HTTP request, byte by byte."""
    lines = [f"POST {path} HTTP/1.1", "Host: 127.0.0.1", "Content-Type: application/json", f"Content-Length: {len(body)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 240))
