"""Every ``curl …`` that the project's texts tell to type, sent as curl would send it."""

import json
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import httpx
import pytest
from serve_process import PATIENCE, served
from server_support import events
from shell_lines import commands

COMMANDS = commands("curl")
STREAMED = '"stream": true'


@dataclass
class Written:
    """What a command asks for."""

    url: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    data: str | None = None


def read(words):
    written, rest = Written(), iter(words[1:])
    for word in rest:
        if word == "-H":
            name, value = next(rest).split(": ")
            written.headers[name] = value
        elif word == "-d":
            written.data = next(rest)
        elif word not in ("-N", "-i"):  # print at once; print headers too
            assert not word.startswith("-"), word
            written.url = word
    return written


def test_there_are_requests_of_every_kind():
    written = [read(words) for words in COMMANDS]
    paths = {"/v1/completions", "/v1/chat/completions", "/health", "/metrics"}
    assert {urlsplit(one.url).path for one in written} == paths
    assert {STREAMED in one.data for one in written if one.data} == {True, False}


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    with served(tmp_path_factory.mktemp("serve"), "--port", "0", "--num-gpu-blocks-override", "64") as running:
        yield running.url


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_request_is_answered(url, words):
    written = read(words)
    method = "GET" if written.data is None else "POST"
    asked = written.url.replace("http://127.0.0.1:8000", url)  # where refimpl serve listens by default
    options = {"headers": written.headers, "content": written.data, "timeout": PATIENCE, "trust_env": False}
    reply = httpx.request(method, asked, **options)
    assert reply.status_code == 200
    if written.data is None:
        return
    *told, last = events(reply.text) if STREAMED in written.data else (reply.text, "[DONE]")
    assert last == "[DONE]"
    assert any(json.loads(event)["choices"] for event in told)
    assert "x-ignored-fields" not in reply.headers
