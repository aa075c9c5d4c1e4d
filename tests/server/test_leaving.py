"""Who leaves, and when the server does: blocks come back within two steps, answers finish or are ended with a word."""

import json
import threading
import time

import httpx
import pytest
from server_support import LiveServer, Raw, events, request_bytes, until

LONG = {"prompt": "Hello", "max_tokens": 400, "ignore_eos": True}


def begin(server, body, **headers):
    return Raw(server.address, request_bytes("/v1/completions", json.dumps(body).encode(), **headers))


@pytest.fixture
def held(server):
    """The shared server with its engine held between two steps."""
    gate = server.llm.engine.gate
    gate.close()
    yield server
    gate.open()


def steps_until_idle(server):
    """Let the engine go step by step until nothing is left; how many steps it took."""
    engine = server.llm.engine
    before = engine.scheduler.step
    server.llm.engine.gate.open()
    until(server.idle)
    return engine.scheduler.step - before


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("way", ["close", "vanish"])
def test_blocks_of_a_client_that_leaves_are_back_within_two_steps(held, stream, way):
    gate = held.llm.engine.gate
    client = begin(held, LONG | {"stream": stream, "n": 2})
    until(lambda: held.llm.engine.has_unfinished_requests())
    gate.allow(3)
    if stream:
        assert b"data: " in client.read_until(b"data: ")
    until(lambda: held.llm.engine.memory_report().usage.used_blocks > 0)
    until(lambda: gate.holds)
    client.vanish() if way == "vanish" else client.socket.close()
    until(lambda: not len(held.service.in_flight))
    assert steps_until_idle(held) <= 2


def test_a_client_that_leaves_while_its_request_waits(held):
    client = begin(held, LONG)
    until(lambda: held.llm.engine.has_unfinished_requests())
    client.vanish()
    until(held.idle)


def test_a_client_that_leaves_in_its_body_is_forgotten(server):
    body = json.dumps(LONG).encode()
    client = Raw(server.address, request_bytes("/v1/completions", body)[:-9])
    time.sleep(0.05)
    client.vanish()
    assert server.complete(prompt="x").status_code == 200


def test_a_slow_reader_is_told_all_of_it_in_larger_pieces(server):
    whole = server.complete(**LONG, seed=1, logprobs=20).json()["choices"][0]
    client = begin(server, LONG | {"seed": 1, "logprobs": 20, "stream": True}, Connection="close")
    until(server.idle)  # the engine has long ended
    text = client.read_all().decode().partition("\r\n\r\n")[2]
    data = "".join(piece for piece in text.split("\r\n") if piece.startswith("data: ") or "\n\n" in piece)
    told = [json.loads(one) for one in events(data)[:-1]]
    assert "".join(event["choices"][0]["text"] for event in told) == whole["text"]
    client.socket.close()


def test_another_who_aborts_in_the_engine_ends_the_answer(held):
    replies = []
    asking = threading.Thread(target=lambda: replies.append(held.complete(**LONG)))
    asking.start()
    until(lambda: held.llm.engine.unfinished_request_ids())
    held.llm.engine.abort(held.llm.engine.unfinished_request_ids())
    asking.join()
    assert replies[0].status_code in (400, 503)


def test_shutting_down_lets_answers_finish():
    server = LiveServer(shutdown_timeout=20)
    replies = []
    asking = threading.Thread(target=lambda: replies.append(server.complete(**LONG)))
    server.llm.engine.gate.close()
    asking.start()
    until(lambda: server.llm.engine.has_unfinished_requests())
    server.runner.stop()
    until(lambda: server.service.in_flight.closed)
    server.llm.engine.gate.open()
    asking.join()
    assert replies[0].status_code == 200
    assert len(replies[0].json()["choices"][0]["text"]) > 0
    server.thread.join(20)
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.url}/health", trust_env=False)
    server.close()


def test_answers_that_do_not_finish_in_time_are_ended_with_a_word():
    server = LiveServer(shutdown_timeout=0.3)
    gate = server.llm.engine.gate
    gate.close()
    stream, whole = begin(server, LONG | {"stream": True}), begin(server, LONG)
    until(lambda: len(server.llm.engine.unfinished_request_ids()) == 2)
    gate.allow(3)
    assert b"data: " in stream.read_until(b"data: ")
    server.runner.stop()
    assert b'"code":"shutting_down"' in stream.read_all()
    assert b" 503 " in whole.read_all()
    gate.open()
    server.thread.join(20)
    until(server.idle)
    server.close()
    for client in (stream, whole):
        client.socket.close()
