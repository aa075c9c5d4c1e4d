"""What OpenAI's own client sees: choices, usage, reasons, log-probabilities, streams, errors by class."""

import json

import openai
import pytest
from server_support import events

from refimpl import SamplingParams

GO_ON = {"ignore_eos": True}
MESSAGES = [{"role": "system", "content": "Short."}, {"role": "user", "content": "Grüße, 世界 🙂"}]


def engine_text(server, prompt, **options):
    """What the engine itself says, through AsyncLLM's thread."""
    import asyncio

    async def ask():
        return await server.llm.generate(prompt, SamplingParams(**options))

    return asyncio.run(ask())


# ---------------------------------------------------------------------- completions


def test_a_completion_is_what_the_engine_generates(server):
    reply = server.openai.completions.create(model="tiny", prompt="Hello", max_tokens=12, seed=3, extra_body=GO_ON)
    expected = engine_text(server, "Hello", max_tokens=12, seed=3, ignore_eos=True).outputs[0]
    assert reply.object == "text_completion"
    assert reply.id.startswith("cmpl-")
    assert reply.model == "tiny"
    [choice] = reply.choices
    assert (choice.index, choice.text, choice.finish_reason) == (0, expected.text, expected.finish_reason)
    assert choice.logprobs is None
    usage = reply.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (5, 12, 17)


@pytest.mark.parametrize(
    ("prompt", "sizes"),
    [
        ("abc", [3]),
        (["abc", "de"], [3, 2]),
        ([1, 2, 3, 4], [4]),
        ([[1, 2], [3, 4, 5]], [2, 3]),
    ],
)
def test_prompts_of_every_kind_and_usage_summed_over_choices(server, prompt, sizes):
    reply = server.openai.completions.create(model="tiny", prompt=prompt, n=2, max_tokens=5, seed=1, extra_body=GO_ON)
    assert [choice.index for choice in reply.choices] == list(range(2 * len(sizes)))
    assert reply.usage.prompt_tokens == sum(sizes)
    assert reply.usage.completion_tokens == 5 * 2 * len(sizes)
    prompts = [prompt] if len(sizes) == 1 else prompt
    alone = [
        server.openai.completions.create(model="tiny", prompt=one, n=2, max_tokens=5, seed=1, extra_body=GO_ON)
        for one in prompts
    ]
    assert [choice.text for choice in reply.choices] == [choice.text for one in alone for choice in one.choices]


def test_a_stream_of_several_prompts_and_samples_is_the_whole_reply(server):
    arguments = {"model": "tiny", "prompt": ["ab", "cde"], "n": 3, "max_tokens": 9, "seed": 5, "extra_body": GO_ON}
    whole = server.openai.completions.create(**arguments)
    texts, reasons = dict.fromkeys(range(6), ""), {}
    usage = None
    stream = server.openai.completions.create(**arguments, stream=True, stream_options={"include_usage": True})
    for chunk in stream:
        assert chunk.id.startswith("cmpl-")
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            if choice.finish_reason is not None:
                assert choice.index not in reasons
                reasons[choice.index] = choice.finish_reason
        usage = chunk.usage
    assert texts == {choice.index: choice.text for choice in whole.choices}
    assert reasons == {choice.index: choice.finish_reason for choice in whole.choices}
    assert usage == whole.usage
    assert usage.completion_tokens == 6 * 9


def test_the_first_chunks_say_no_usage_and_the_stream_ends_with_done(server):
    body = {"prompt": "x", "max_tokens": 3, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
    told = events(server.complete(**body).text)
    assert told[-1] == "[DONE]"
    assert [json.loads(one)["usage"] is None for one in told[:-1]] == [True] * (len(told) - 2) + [False]
    assert json.loads(told[-2])["choices"] == []
    body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    counts = [json.loads(one)["usage"]["completion_tokens"] for one in events(server.complete(**body).text)[:-1]]
    assert counts == sorted(counts)
    assert counts[-1] == 3
    del body["stream_options"]
    assert not any("usage" in json.loads(one) for one in events(server.complete(**body).text)[:-1])


def test_echo_puts_the_prompt_before_each_choice(server):
    plain = server.openai.completions.create(model="tiny", prompt="Grüße ", max_tokens=4, seed=2, n=2)
    echoed = server.openai.completions.create(model="tiny", prompt="Grüße ", max_tokens=4, seed=2, n=2, echo=True)
    assert [one.text for one in echoed.choices] == ["Grüße " + one.text for one in plain.choices]
    streamed = ["", ""]
    for chunk in server.openai.completions.create(
        model="tiny", prompt="Grüße ", max_tokens=4, seed=2, n=2, echo=True, stream=True
    ):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == [one.text for one in echoed.choices]


def test_log_probabilities_stand_where_their_tokens_do(server):
    prompt = "é🙂x"
    reply = server.openai.completions.create(
        model="tiny", prompt=prompt, max_tokens=30, logprobs=2, echo=True, seed=8, temperature=1.5
    )
    text, found = reply.choices[0].text, reply.choices[0].logprobs
    assert len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs) == len(found.text_offset)
    assert len(found.tokens) == len(prompt.encode()) + reply.usage.completion_tokens
    assert found.text_offset[:7] == [0, 0, 1, 1, 1, 1, 2]  # two bytes of é, four of the face, then x
    assert found.token_logprobs[0] is None
    assert found.top_logprobs[0] is None
    assert all(value <= 0 for value in found.token_logprobs[1:])
    assert found.text_offset == sorted(found.text_offset)
    ends = [*found.text_offset[1:], len(text)]
    for token, begin, end in zip(found.tokens, found.text_offset, ends, strict=True):
        if not token.startswith(("bytes:", "<|")) and end > begin:
            assert text[begin:end].endswith(token)  # what was held back before it comes with it
    for token, value, top in zip(found.tokens[1:], found.token_logprobs[1:], found.top_logprobs[1:], strict=True):
        assert top[token] == value
        assert 2 <= len(top) <= 3


def test_log_probabilities_of_a_stream_are_those_of_the_whole(server):
    arguments = {"model": "tiny", "prompt": "ab", "max_tokens": 20, "logprobs": 1, "seed": 4, "echo": True}
    whole = server.openai.completions.create(**arguments).choices[0].logprobs
    joined = {"tokens": [], "token_logprobs": [], "text_offset": [], "top_logprobs": []}
    for chunk in server.openai.completions.create(**arguments, stream=True):
        for name, values in joined.items():
            values += getattr(chunk.choices[0].logprobs, name)
    assert joined == {name: getattr(whole, name) for name in joined}


def test_max_tokens_0_scores_a_prompt(server):
    reply = server.openai.completions.create(model="tiny", prompt="abcd", max_tokens=0, echo=True, logprobs=0)
    [choice] = reply.choices
    assert (choice.text, choice.finish_reason, reply.usage.completion_tokens) == ("abcd", "length", 0)
    assert choice.logprobs.tokens == list("abcd")
    assert [top and list(top) for top in choice.logprobs.top_logprobs] == [None, ["b"], ["c"], ["d"]]
    streamed = list(
        server.openai.completions.create(model="tiny", prompt="abcd", max_tokens=0, echo=True, logprobs=0, stream=True)
    )
    assert "".join(chunk.choices[0].text for chunk in streamed) == "abcd"
    refused = server.complete(prompt="abcd", max_tokens=0)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "max_tokens")


def test_stop_strings_and_stop_ids_end_a_text(server):
    arguments = {"model": "tiny", "prompt": "Hello", "max_tokens": 40, "seed": 3}
    text = server.openai.completions.create(**arguments, extra_body=GO_ON).choices[0].text
    stop = text[5:7]
    cut = server.openai.completions.create(**arguments, extra_body=GO_ON, stop=[stop])
    assert (cut.choices[0].text, cut.choices[0].finish_reason) == (text[: text.index(stop)], "stop")
    assert cut.choices[0].stop_reason == stop
    kept = server.openai.completions.create(**arguments, stop=stop, extra_body=GO_ON | {"include_stop_str_in_output": True})
    assert kept.choices[0].text == text[: text.index(stop)] + stop
    ids = server.complete(prompt="Hello", max_tokens=40, seed=3, ignore_eos=True, return_token_ids=True).json()["choices"][
        0
    ]["token_ids"]
    stopped = server.complete(
        prompt="Hello", max_tokens=40, seed=3, ignore_eos=True, stop_token_ids=[ids[4]], return_token_ids=True
    )
    [choice] = stopped.json()["choices"]
    assert choice["token_ids"] == ids[: ids.index(ids[4]) + 1]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", ids[4])
    assert choice["prompt_token_ids"] == list(b"Hello")


def test_vllms_extra_fields_have_their_effect(server):
    def ids(**options):
        reply = server.complete(prompt="Hello", max_tokens=8, return_token_ids=True, **options)
        assert reply.status_code == 200, reply.text
        return reply.json()["choices"][0]["token_ids"]

    greedy = ids(temperature=0)
    assert ids(top_k=1, seed=5) == ids(min_p=1, seed=6) == ids(top_p=0, seed=7) == greedy
    assert set(ids(allowed_token_ids=[65, 66], seed=1)) <= {65, 66}
    assert ids(temperature=0, logit_bias={"67": 100}) == [67] * 8
    assert greedy[0] not in ids(temperature=0, logit_bias={str(greedy[0]): -100})
    first = bytes(greedy[:1]).decode("latin-1")
    if first.isascii():
        assert ids(temperature=0, bad_words=[first])[0] != greedy[0]
    assert len(set(ids(temperature=0, repetition_penalty=1000.0))) == 8
    assert len(ids(temperature=0, logit_bias={"256": 100}, min_tokens=3)) == 4  # 256 ends a text
    assert ids(temperature=0, logit_bias={"256": 100}) == [256]
    assert ids(temperature=0, logit_bias={"256": 100}, ignore_eos=True) == [256] * 8
    assert (
        server.complete(prompt="Hello", logit_bias={"256": 100}, ignore_eos=True, temperature=0).json()["choices"][0]["text"]
        == ""
    )
    shown = server.complete(
        prompt="Hello", logit_bias={"256": 100}, ignore_eos=True, temperature=0, max_tokens=2, skip_special_tokens=False
    )
    assert shown.json()["choices"][0]["text"] == "<|end|><|end|>"
    cut = server.complete(prompt="Hello", max_tokens=1, truncate_prompt_tokens=2).json()
    assert cut["usage"]["prompt_tokens"] == 2
    most = server.complete(prompt=[7] * 2000, max_tokens=12, truncate_prompt_tokens=-1, ignore_eos=True).json()
    assert most["usage"]["prompt_tokens"] == 500
    scored = server.complete(prompt="Hey", max_tokens=1, prompt_logprobs=0).json()["choices"][0]["prompt_logprobs"]
    assert [one and list(one) for one in scored] == [None, ["101"], ["121"]]
    named = server.complete(prompt="Hey", max_tokens=1, logprobs=0, return_tokens_as_token_ids=True, temperature=0)
    assert named.json()["choices"][0]["logprobs"]["tokens"][0].startswith("token_id:")


def test_a_salt_parts_what_is_cached(server):
    prompt = [9] * 64

    def cached(salt):
        usage = server.complete(prompt=prompt, max_tokens=1, cache_salt=salt).json()["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    assert [cached("one"), cached("one") > 0, cached("two"), cached("two") > 0] == [0, True, 0, True]


# ---------------------------------------------------------------------- chat


def test_a_chat_is_rendered_by_the_models_template(server):
    reply = server.openai.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=6, seed=1)
    prompt = "".join(f"<|{one['role']}|>{one['content']}<|end|>" for one in MESSAGES) + "<|assistant|>"
    expected = engine_text(server, prompt, max_tokens=6, seed=1).outputs[0].text
    [choice] = reply.choices
    assert reply.object == "chat.completion"
    assert (choice.message.role, choice.message.content) == ("assistant", expected)
    assert reply.usage.prompt_tokens == len(server.llm.get_tokenizer().encode(prompt))
    parts = [{"role": "developer", "content": "Short."}, {"role": "user", "content": [{"type": "text", "text": "Grüße, "}]}]
    parts[1]["content"].append({"type": "text", "text": "世界 🙂"})
    again = server.openai.chat.completions.create(model="tiny", messages=parts, max_completion_tokens=6, seed=1)
    assert again.choices[0].message.content == expected


def test_a_chat_streams_its_role_first_and_then_the_same_text(server):
    arguments = {
        "model": "tiny",
        "messages": MESSAGES,
        "max_tokens": 20,
        "seed": 2,
        "n": 2,
        "logprobs": True,
        "top_logprobs": 3,
    }
    whole = server.openai.chat.completions.create(**arguments)
    texts, logprobs, roles = ["", ""], [[], []], [[], []]
    for chunk in server.openai.chat.completions.create(**arguments, stream=True):
        assert chunk.object == "chat.completion.chunk"
        for choice in chunk.choices:
            roles[choice.index].append(choice.delta.role)
            texts[choice.index] += choice.delta.content or ""
            if choice.logprobs is not None:
                logprobs[choice.index] += choice.logprobs.content
    assert texts == [one.message.content for one in whole.choices]
    assert logprobs == [one.logprobs.content for one in whole.choices]
    assert all(told[0] == "assistant" and set(told[1:]) == {None} for told in roles)
    for token in logprobs[0]:
        assert len(token.top_logprobs) == 3
        assert [top.logprob for top in token.top_logprobs] == sorted((t.logprob for t in token.top_logprobs), reverse=True)
    ids = server.llm.get_tokenizer()
    joined = bytes(byte for token in logprobs[1] for byte in token.bytes if not token.token.startswith("<|"))
    assert joined.decode("utf-8", "replace").startswith(texts[1].rstrip("\ufffd")[:5])
    assert ids.is_byte_level


def test_the_clients_own_helper_for_streams_works(server):
    arguments = {"model": "tiny", "messages": MESSAGES, "seed": 1, "logit_bias": {"98": 9, "97": 9}, "stop": "ab"}
    with server.openai.chat.completions.stream(**arguments) as stream:
        final = stream.get_final_completion()
    whole = server.openai.chat.completions.create(**arguments)
    assert final.choices[0].message.content == whole.choices[0].message.content


# ---------------------------------------------------------------------- what else is there


def test_models_tokens_version_and_load(server):
    [model] = server.openai.models.list().data
    assert model == server.openai.models.retrieve("tiny")
    assert (model.id, model.owned_by, model.max_model_len) == ("tiny", "refimpl", 512)
    with pytest.raises(openai.NotFoundError):
        server.openai.models.retrieve("org/other")
    told = server.post("/tokenize", {"prompt": "Grüße", "return_token_strs": True}).json()
    assert told["tokens"] == list("Grüße".encode())
    assert (told["count"], told["max_model_len"], len(told["token_strs"])) == (7, 512, 7)
    assert server.post("/detokenize", {"tokens": told["tokens"]}).json() == {"prompt": "Grüße"}
    chat = server.post("/tokenize", {"messages": [{"role": "user", "content": "a"}]}).json()["tokens"]
    assert server.post("/detokenize", {"tokens": chat}).json() == {"prompt": "<|user|>a<|end|><|assistant|>"}
    assert server.http.get("/health").status_code == server.http.get("/ready").status_code == 200
    assert server.http.get("/version").json().keys() == {"version"}
    assert server.http.get("/load").json() == {"server_load": 0, "num_running": 0, "num_waiting": 0}


def test_a_request_id_goes_in_and_out(server):
    given = server.complete(prompt="x", max_tokens=1)
    assert len(given.headers["x-request-id"]) == 32
    mine = server.post("/v1/completions", {"prompt": "x", "max_tokens": 1}, headers={"X-Request-Id": "my-1"})
    assert mine.headers["x-request-id"] == "my-1"
    twice = [server.post("/v1/completions", {"prompt": "x"}, headers={"X-Request-Id": "my-1"}).status_code for _ in range(2)]
    assert twice == [200, 200]
    odd = server.post("/v1/completions", {"prompt": "x"}, headers={"X-Request-Id": "a b" * 99})
    assert odd.headers["x-request-id"] != "a b" * 99


def test_fields_that_nobody_knows_are_named_and_ignored(server):
    body = {"prompt": "x", "max_tokens": 2, "seed": 1, "store": False, "metadata": {"a": "b"}, "temprature": 3}
    reply = server.complete(**body)
    assert reply.headers["x-ignored-fields"] == "store, metadata, temprature"
    plain = server.complete(prompt="x", max_tokens=2, seed=1)
    assert "x-ignored-fields" not in plain.headers
    assert reply.json()["choices"] == plain.json()["choices"]


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("größe", "gr%C3%B6%C3%9Fe"),
        ("温度", "%E6%B8%A9%E5%BA%A6"),
        ("a\r\nSet-Cookie: b=c", "a%0D%0ASet-Cookie%3A%20b%3Dc"),
        ("a, b", "a%2C%20b"),
        ("\0\x7f", "%00%7F"),
        ("", "..."),
        ("x" * 1000, "x" * 128 + "..."),
        ("😀" * 1000, ("%F0%9F%98%80" * 11)[:128] + "..."),
    ],
)
def test_names_that_no_header_bears_are_percent_encoded(server, name, told):
    reply = server.complete(prompt="x", max_tokens=1, **{name: 1}, plain=1)
    assert reply.status_code == 200
    assert reply.headers["x-ignored-fields"] == f"{told}, plain"
    assert "set-cookie" not in reply.headers


def test_null_is_the_default_of_every_field(server):
    schema = server.http.get("/openapi.json").json()["components"]["schemas"]["CompletionRequest"]
    names = set(schema["properties"]) - {"prompt", "seed"}
    assert len(names) > 30
    reply = server.complete(**dict.fromkeys(names), prompt="x", seed=1)
    assert reply.status_code == 200, reply.text
    assert reply.json()["choices"] == server.complete(prompt="x", seed=1).json()["choices"]
