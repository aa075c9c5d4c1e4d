"""200 random requests: what a stream says, put together, is the whole reply, byte for byte, whatever ends it."""

import asyncio
import json
import random
import socket

import httpx
from server_support import events, run

ALPHABET = ["a", "e", " ", "ß", "é", "世", "🙂", "\n", '"', "\\", "\u2028"]


def random_request(chosen):
    prompts = ["".join(chosen.choices(ALPHABET, k=chosen.randint(1, 20))) for _ in range(chosen.choice([1, 1, 1, 2]))]
    body = {
        "prompt": prompts if len(prompts) > 1 else prompts[0],
        "max_tokens": chosen.randint(1, 20),
        "temperature": chosen.choice([0, 0.7, 1, 3]),
        "seed": chosen.randint(0, 2**40),
        "n": chosen.choice([1, 1, 1, 2]),
        "echo": chosen.random() < 0.2,
        "skip_special_tokens": chosen.random() < 0.5,
        "include_stop_str_in_output": chosen.random() < 0.3,
        # Bytes of two characters of three and four bytes, and a few letters: texts with whole characters and broken ones.
        "allowed_token_ids": [*"世🙂é".encode(), *b"abe ", 256] if chosen.random() < 0.7 else None,
    }
    if chosen.random() < 0.7:
        body["stop"] = [
            "".join(chosen.choices(["a", "b", "e", " ", "世", "é", "\ufffd"], k=chosen.randint(1, 2))) for _ in "ab"
        ]
    if chosen.random() < 0.3:
        body["logprobs"] = chosen.randint(0, 3)
    return body


def joined(text):
    """Choices put together from the events of a stream; its usage."""
    told = [json.loads(one) for one in events(text)[:-1]]
    choices = {}
    for event in told:
        for choice in event["choices"]:
            kept = choices.setdefault(choice["index"], choice | {"text": "", "logprobs": None})
            kept["text"] += choice["text"]
            kept |= {name: choice[name] for name in ("finish_reason", "stop_reason")}
            if choice["logprobs"] is not None:
                kept["logprobs"] = kept["logprobs"] or {name: [] for name in choice["logprobs"]}
                for name, values in choice["logprobs"].items():
                    kept["logprobs"][name] += values
    return [choices[index] for index in sorted(choices)], told[-1]["usage"]


def without_numbers(choice):
    """A choice without its log-probabilities, whose last digits hang on who else is in the batch."""
    logprobs = choice["logprobs"] and {name: choice["logprobs"][name] for name in ("tokens", "text_offset")}
    return choice | {"logprobs": logprobs}


def test_joined_streams_are_whole_replies(server):
    chosen = random.Random(7)
    bodies = [random_request(chosen) for _ in range(200)]
    reasons, multibyte = set(), 0

    async def compare(client, body, gate):
        nonlocal multibyte
        async with gate:
            whole = (await client.post("/v1/completions", json=body)).json()
            options = {"stream": True, "stream_options": {"include_usage": True}}
            stream = await client.post("/v1/completions", json=body | options)
        choices, usage = joined(stream.text)
        said = [(without_numbers(a), without_numbers(b)) for a, b in zip(choices, whole["choices"], strict=True)]
        assert all(a == b for a, b in said), body
        del (
            usage["prompt_tokens_details"],
            whole["usage"]["prompt_tokens_details"],
        )  # the second finds the first one's prompt
        assert usage == whole["usage"]
        reasons.update(choice["finish_reason"] for choice in choices)
        multibyte += any(len(choice["text"]) < len(choice["text"].encode()) for choice in choices)

    async def all_of_them():
        gate = asyncio.Semaphore(16)
        async with httpx.AsyncClient(base_url=server.url, timeout=60, trust_env=False) as client:
            await asyncio.gather(*(compare(client, body, gate) for body in bodies))

    run(all_of_them())
    assert reasons == {"stop", "length"}
    assert multibyte > 50


def test_the_first_token_waits_for_no_acknowledgement(server):
    """By Nagle's algorithm a small packet waits while one before it is unacknowledged, and clients take 40 ms for that."""
    with server.http.stream("POST", "/v1/completions", json={"prompt": "Hello", "max_tokens": 2, "stream": True}) as answer:
        accepted = [one.transport.get_extra_info("socket") for one in list(server.runner.server_state.connections)]
        assert accepted
        assert all(one.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for one in accepted)
        answer.read()
