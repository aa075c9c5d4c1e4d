"""Bad input: each kind has its status and a body that says which field; nothing of it reaches other requests."""

import json
import threading
import time

import openai
import pytest
from server_support import LiveServer, Raw, request_bytes, until

from refimpl.server.door import DoorRules
from refimpl.server.limits import Limits


def error_of(reply, status):
    assert reply.status_code == status, reply.text
    assert reply.headers["content-type"] == "application/json"
    error = reply.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error


def raw(server, body, status=400, path="/v1/completions"):
    return error_of(server.http.post(path, content=body, headers={"Content-Type": "application/json"}), status)


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"",
        b"[]",
        b"null",
        b'"prompt"',
        b'{"prompt": NaN}',
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "temperature": Infinity}',
        b'{"prompt": "x", "temperature": 1e999}',
        b'{"prompt": "\xff\xfe"}',
        b'{"prompt": "x"} trailing',
        b'{"prompt": "x", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"prompt": ' + b'{"a":' * 5000 + b"1" + b"}" * 5000 + b"}",
        b'{"prompt": "\\ud800"}',
    ],
    ids=range(15),
)
def test_what_is_no_json_object(server, body):
    assert raw(server, body)["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt", 5),
        ("prompt", None),
        ("prompt", {"a": 1}),
        ("prompt", []),
        ("prompt", ["a", 1]),
        ("prompt", [[1], "a"]),
        ("prompt", [True]),
        ("prompt", [1.5]),
        ("prompt", ""),
        ("prompt", [[]]),
        ("prompt", [-1]),
        ("prompt", [320]),
        ("prompt", [10**30]),
        ("prompt", [1] * 600),
        ("prompt", "x" * 600),
        ("prompt", "x" * 300_000),
        ("max_tokens", "5"),
        ("max_tokens", 1.5),
        ("max_tokens", -1),
        ("max_tokens", True),
        ("temperature", "1"),
        ("temperature", -1),
        ("temperature", 10**400),
        ("top_p", 2),
        ("top_k", -2),
        ("min_p", -0.1),
        ("presence_penalty", 3),
        ("frequency_penalty", -3),
        ("repetition_penalty", 0),
        ("seed", 2**64),
        ("seed", "x"),
        ("n", 0),
        ("n", 129),
        ("n", 10**30),
        ("best_of", 2),
        ("logprobs", 21),
        ("logprobs", -1),
        ("logprobs", True),
        ("prompt_logprobs", 10**9),
        ("min_tokens", 10**9),
        ("min_tokens", -1),
        ("stop", ""),
        ("stop", [""]),
        ("stop", [1]),
        ("stop", ["x"] * 33),
        ("stop", "x" * 1025),
        ("bad_words", [" "]),
        ("bad_words", ["x"] * 257),
        ("logit_bias", {"320": 1}),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {str(i): 1 for i in range(1025)}),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [320]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [0] * 65_537),
        ("truncate_prompt_tokens", 0),
        ("truncate_prompt_tokens", -2),
        ("cache_salt", "x" * 257),
        ("priority", 1),
        ("stream", "yes"),
        ("stream_options", {"include_usage": "yes"}),
        ("suffix", "end"),
        ("response_format", {"type": "xml"}),
        ("response_format", {"type": "json_schema"}),
        ("structured_outputs", {"regex": "("}),
        ("guided_json", "{"),
    ],
    ids=str,
)
def test_a_field_that_is_wrong_is_refused_alone(server, field, value):
    body = json.dumps({"model": "tiny", "prompt": "x", field: value})
    error = raw(server, body.encode())
    assert error["type"] == "invalid_request_error"
    assert len(error["message"]) < 2100
    streamed = raw(server, json.dumps({"model": "tiny", "prompt": "x", "stream": True, field: value}).encode())
    if field not in ("stream", "prompt_logprobs"):
        assert streamed == error  # refused before a stream begins


def test_the_field_that_is_wrong_is_named(server):
    assert error_of(server.complete(prompt="x", temperature="1"), 400)["param"] == "temperature"
    assert error_of(server.complete(prompt="x", temperature=-1), 400)["param"] == "temperature"
    assert error_of(server.complete(prompt=[1] * 600), 400)["code"] == "context_length_exceeded"
    assert error_of(server.complete(), 400)["message"].count("prompt") == 1
    nested = error_of(server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": 1}]}]}), 400)
    assert nested["param"] == "messages"
    assert "messages[0].content" in nested["message"]


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [{"role": "user"}],
        [{"role": "tool", "content": "x"}],
        [{"role": "<|end|>", "content": "x"}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}],
        [{"role": "user", "content": [{"type": "input_audio"}]}],
        [{"role": "assistant", "content": None, "tool_calls": [{}]}],
        [{"role": "user", "content": "x" * 600}],
        [{"role": "user", "content": "x"}] * 5000,
    ],
)
def test_messages_that_cannot_be_read(server, messages):
    assert error_of(server.post("/v1/chat/completions", {"messages": messages}), 400)["param"] in ("messages", "prompt")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("functions", [{"name": "f"}]),
        ("chat_template", "{{ messages }}"),
        ("modalities", ["text", "audio"]),
        ("audio", {"voice": "alloy"}),
        ("documents", [{"title": "x"}]),
        ("chat_template_kwargs", {"chat_template": "{{ 1 }}"}),
        ("chat_template_kwargs", {"tokenize": True}),
        ("chat_template_kwargs", {"bos_token": "x"}),
        ("top_logprobs", 3),
    ],
)
def test_what_this_server_has_not_is_refused_and_named(server, field, value):
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    error = error_of(server.post("/v1/chat/completions", body | {field: value}), 400)
    assert field in error["message"] or error["param"] == "messages"
    for nothing in (None, [], {}, False):
        if field not in ("chat_template_kwargs", "top_logprobs"):
            assert server.post("/v1/chat/completions", body | {field: nothing}).status_code == 200


def test_variables_of_the_template_are_taken(server):
    body = {
        "messages": [{"role": "user", "content": "x"}],
        "max_tokens": 1,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    assert server.post("/v1/chat/completions", body).status_code == 200


def test_errors_have_the_classes_of_openais_client(server):
    client = server.openai
    with pytest.raises(openai.NotFoundError) as error:
        client.completions.create(model="other", prompt="x")
    assert (error.value.code, error.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as error:
        client.completions.create(model="tiny", prompt="x", temperature=-1)
    assert error.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="tiny", input="x")


def test_other_paths_methods_and_kinds_of_body(server):
    assert error_of(server.http.get("/nothing"), 404)["code"] == "no_such_route"
    assert error_of(server.http.get("/v1/completions"), 405)["code"] == "no_such_route"
    form = server.http.post("/v1/completions", data={"prompt": "x"})
    assert error_of(form, 415)["code"] == "unsupported_media_type"
    assert error_of(server.http.post("/tokenize", json={"prompt": "x", "messages": []}), 400)
    assert error_of(server.http.post("/detokenize", json={"tokens": [320]}), 400)["param"] == "tokens"


def test_a_row_without_a_token_left_is_the_requests_own_fault(server):
    # "a" alone is allowed, and "aa" is a bad word: after the first there is nothing to draw.
    body = {"prompt": "x", "allowed_token_ids": [97], "bad_words": ["aa"], "max_tokens": 4}
    assert error_of(server.complete(**body), 400)["code"] == "no_token_left"
    told = server.complete(**body, stream=True)
    if told.status_code == 400:  # both steps were done before the first piece was sent: merged for a slow reader
        assert error_of(told, 400)["code"] == "no_token_left"
    else:
        assert told.status_code == 200
        assert json.loads(told.text.split("\n\n")[-3].removeprefix("data: "))["error"]["code"] == "no_token_left"
        assert told.text.endswith("data: [DONE]\n\n")
    with pytest.raises(openai.APIError, match="no token is left"):
        list(server.openai.completions.create(model="tiny", prompt="x", extra_body=body, stream=True))


# ---------------------------------------------------------------------- a server with narrow doors


@pytest.fixture(scope="module")
def narrow():
    rules = DoorRules(("secret", "other"), ("127.0.0.1", "localhost"), ("https://page.example",))
    server = LiveServer(limits=Limits(max_body_bytes=2000, body_timeout=0.4, max_prompts=2), rules=rules)
    server.http.headers["Authorization"] = "Bearer secret"
    yield server
    until(server.idle)
    server.close()


def test_a_key_is_asked_for_but_for_the_probes(narrow):
    for header in ({"Authorization": ""}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic secret"}):
        reply = narrow.post("/v1/completions", {"prompt": "x"}, headers=header)
        assert error_of(reply, 401)["code"] == "invalid_api_key"
        assert "secret" not in reply.text
        assert narrow.http.get("/v1/models", headers=header).status_code == 401
        assert narrow.http.get("/openapi.json", headers=header).status_code == 401
        assert narrow.http.get("/health", headers=header).status_code == 200
    assert narrow.complete(prompt="x").status_code == 200
    with pytest.raises(openai.AuthenticationError):
        narrow.openai.completions.create(model="tiny", prompt="x")


def test_clients_of_different_keys_share_no_prefix(narrow):
    def cached(key):
        headers = {"Authorization": f"Bearer {key}"}
        reply = narrow.post("/v1/completions", {"prompt": "ab" * 40, "max_tokens": 1}, headers=headers)
        return reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert [cached("secret"), cached("secret") > 0, cached("other"), cached("other") > 0] == [0, True, 0, True]


def test_other_names_and_pages_may_not_ask(narrow):
    refused = narrow.http.get("/health", headers={"Host": "evil.example"})
    assert error_of(refused, 403)["code"] == "host_refused"
    assert (
        error_of(narrow.http.get("/v1/models", headers={"Origin": "https://evil.example"}), 403)["code"] == "origin_refused"
    )
    allowed = narrow.http.get("/v1/models", headers={"Origin": "https://page.example"})
    assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, "https://page.example")
    asked = {"Origin": "https://page.example", "Access-Control-Request-Method": "POST", "Authorization": ""}
    preflight = narrow.http.options("/v1/completions", headers=asked | {"Access-Control-Request-Headers": "content-type"})
    assert (preflight.status_code, preflight.headers["access-control-allow-headers"]) == (204, "content-type")
    own = narrow.http.get("/v1/models", headers={"Origin": narrow.url})
    assert own.status_code == 200


def test_a_body_over_the_limit_is_not_read(narrow):
    assert error_of(narrow.complete(prompt="x" * 3000), 413)["code"] == "too_large"

    def pieces():
        yield from [b'{"prompt": "', *[b"x" * 1000] * 5]

    headers = {"Content-Type": "application/json"}
    assert error_of(narrow.http.post("/v1/completions", content=pieces(), headers=headers), 413)["code"] == "too_large"
    assert error_of(narrow.complete(prompt=["a"] * 3), 400)["code"] == "limit_exceeded"


def test_slow_clients_are_sent_away(narrow):
    began = time.monotonic()
    body = b'{"prompt": "x"}'
    slow = Raw(narrow.address, request_bytes("/v1/completions", body, Authorization="Bearer secret")[:-5])
    silent, halfway = Raw(narrow.address), Raw(narrow.address, b"POST /v1/completions HTTP/1.1\r\nHos")
    assert b" 408 " in slow.read_until(b"}}")
    assert silent.read_all() == halfway.read_all() == b""
    assert time.monotonic() - began < 15
    for client in (slow, silent, halfway):
        client.socket.close()


# ---------------------------------------------------------------------- hundreds at once, too many, too long


def test_hundreds_at_once_are_all_answered(server):
    replies = []

    def ask(number):
        reply = server.complete(prompt=f"{number}", max_tokens=3, temperature=-(number % 3 == 0))
        replies.append((number % 3 == 0, reply.status_code))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(200)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(replies) == 200
    assert {status for wrong, status in replies if wrong} == {400}
    assert {status for wrong, status in replies if not wrong} == {200}


@pytest.fixture
def small():
    """A server that one request keeps busy: one sequence runs, one waits."""
    server = LiveServer(max_num_seqs=1, max_num_queued_reqs=1, limits=Limits(request_timeout=1.5), stuck_after=0.5)
    yield server
    server.llm.engine.gate.open()
    until(server.idle)
    server.close()


def test_a_full_queue_says_503_and_when_to_come_again(small):
    small.llm.engine.gate.close()
    body = json.dumps({"prompt": "x", "max_tokens": 100}).encode()
    waiting = []
    until(
        lambda: (
            len(small.llm.engine.unfinished_request_ids()) == 1
            or waiting.append(Raw(small.address, request_bytes("/v1/completions", body)))
            or time.sleep(0.2)
        )
    )
    reply = small.complete(prompt="x")
    error = error_of(reply, 503)
    assert (error["code"], error["type"], reply.headers["retry-after"]) == ("queue_full", "overloaded_error", "1")
    with pytest.raises(openai.InternalServerError):
        small.openai.completions.create(model="tiny", prompt="x", stream=True)
    for client in waiting:
        client.vanish()
    until(lambda: small.llm.engine.unfinished_request_ids() == [])
    small.llm.engine.gate.open()
    assert small.complete(prompt="x").status_code == 200


def test_an_answer_that_takes_too_long_ends(small):
    small.llm.engine.gate.close()
    assert error_of(small.complete(prompt="x"), 504)["code"] == "timeout"
    until(small.idle)
    small.llm.engine.gate.open()
    small.llm.engine.gate.allow(2)
    with small.http.stream("POST", "/v1/completions", json={"prompt": "x", "max_tokens": 50, "stream": True}) as reply:
        text = "".join(reply.iter_text())
    assert '"code":"timeout"' in text
    assert text.endswith("data: [DONE]\n\n")
    until(small.idle)


def test_a_stuck_engine_is_told_to_probes_and_to_those_who_wait(small, monkeypatch):
    executor, let_go = small.llm.engine.executor, threading.Event()
    submit = executor.submit
    monkeypatch.setattr(executor, "submit", lambda output: (let_go.wait(20), submit(output))[1])
    replies = []
    asking = threading.Thread(target=lambda: replies.append(small.complete(prompt="x", max_tokens=2)))
    asking.start()
    until(lambda: small.http.get("/health").status_code == 503)
    assert small.http.get("/ready").status_code == 503
    assert error_of(small.complete(prompt="y"), 503)["code"] == "engine_unavailable"
    asking.join()
    assert error_of(replies[0], 503)["code"] in ("engine_unavailable", "timeout")
    let_go.set()
    until(lambda: small.http.get("/health").status_code == 200)
    assert small.complete(prompt="z", max_tokens=1).status_code == 200


def test_a_step_that_fails_is_a_500_and_the_next_request_is_served(small, monkeypatch, caplog):
    runner = small.llm.engine.executor
    submit = runner.submit

    def fail(output):
        raise RuntimeError("/secret/path exploded")

    monkeypatch.setattr(runner, "submit", fail)
    reply = small.complete(prompt="x")
    assert error_of(reply, 500)["type"] == "server_error"
    assert "secret" not in reply.text
    monkeypatch.setattr(runner, "submit", submit)
    assert small.complete(prompt="x").status_code == 200


def test_an_engine_that_is_gone_is_a_503(small):
    small.llm.close()
    assert small.http.get("/health").status_code == 503
    assert error_of(small.complete(prompt="x"), 503)["code"] == "engine_unavailable"
    small.idle = lambda: True
