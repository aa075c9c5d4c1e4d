"""A rank of a served model is killed or stopped: all who wait are told, `/health` says so, and nothing is left behind."""

import os
import signal
import sys
import threading
from pathlib import Path

import httpx
import openai
import pytest
from serve_process import PATIENCE, served
from server_support import LiveServer, until

sys.path.insert(0, str(Path(__file__).parents[1] / "parallel"))
from rank_processes import is_alive

from refimpl.parallel.watch import POLL_SECONDS, SILENT_SECONDS

TWO_RANKS = ("--tensor-parallel-size", 2, "--dtype", "float32")
CLEAR = ("the engine cannot answer: replica 0: another rank of it is lost", "a step of the engine failed while this request")


class Waiting(threading.Thread):
    """Somebody who waits for an answer that takes half a minute, where all is well."""

    def __init__(self, client, stream):
        super().__init__()
        self.client, self.stream = client, stream
        self.pieces, self.error = 0, None
        self.start()

    def run(self):
        body = {"model": "tiny", "prompt": "Hello", "max_tokens": 2000, "stream": self.stream}
        try:
            answer = self.client.completions.create(**body, extra_body={"ignore_eos": True})
            for _ in answer if self.stream else ():
                self.pieces += 1
        except openai.APIError as error:
            self.error = error


def client_of(server):
    http = httpx.Client(timeout=PATIENCE, trust_env=False)
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, http_client=http)


def lose_a_rank(server, name):
    """Send a signal to the rank while a stream and a whole answer are under way; then end the server."""
    [rank] = server.children
    with client_of(server) as client, httpx.Client(base_url=server.url, timeout=PATIENCE, trust_env=False) as http:
        assert client.completions.create(model="tiny", prompt="Hello", max_tokens=3).usage.completion_tokens == 3
        stream, whole = Waiting(client, True), Waiting(client, False)
        until(lambda: stream.pieces and http.get("/load").json()["num_running"] == 2, PATIENCE)
        os.kill(rank, getattr(signal, name))
        for asking in (stream, whole):
            asking.join(PATIENCE)
            assert asking.error is not None, "it was answered, or waits for ever"
            assert any(sentence in asking.error.message for sentence in CLEAR)
        health = http.get("/health")
        assert health.status_code == 503
        assert CLEAR[0] in health.json()["error"]["message"]
        assert http.get("/ready").status_code == 503
        with pytest.raises(openai.InternalServerError, match=CLEAR[0]) as later:
            client.completions.create(model="tiny", prompt="Hello", max_tokens=3)
        assert later.value.status_code == 503
    server.end()
    assert not is_alive(rank)


def test_a_lost_rank_ends_all_answers_within_seconds_and_the_server_can_be_started_again(tmp_path):
    """Asked for is 5 s: a killed rank is seen at once, a stopped one by its silence. A busy machine may take longer."""
    assert SILENT_SECONDS + POLL_SECONDS < 5
    with served(tmp_path, "--port", 0, *TWO_RANKS) as first:
        lose_a_rank(first, "SIGKILL")
        assert "the other ranks are given up: rank 1 was killed by SIGKILL" in first.log.read_text()
    with served(tmp_path, "--port", 0, *TWO_RANKS) as second:
        lose_a_rank(second, "SIGSTOP")
        assert "the other ranks are given up: rank 1 has said nothing for" in second.log.read_text()


def test_a_rank_that_is_lost_while_nobody_asks_is_known():
    server = LiveServer(device="cpu", tensor_parallel_size=2)
    [rank] = server.llm.engine.executor.watch.process_ids
    assert server.http.get("/health").status_code == 200
    os.kill(rank, signal.SIGKILL)
    until(lambda: server.http.get("/health").status_code == 503, PATIENCE)
    assert server.complete(prompt="Hello").status_code == 503
    server.close()
