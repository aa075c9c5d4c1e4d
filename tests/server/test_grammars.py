"""Text that must be JSON, fit a schema, an expression or a choice: whatever the random model would rather say."""

import asyncio
import json
import re

import jsonschema
import pytest
import torch

from refimpl import AsyncLLM, SamplingParams
from refimpl.server.errors import ApiError
from refimpl.server.grammars import GrammarHook, Grammars

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["a", "bé"]},
    },
    "required": ["name", "size", "kind"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}


def texts(server, **options):
    """The texts of samples that ended by themselves, whole and streamed."""
    body = {"prompt": "x", "max_tokens": 90, "n": 3, **options}
    whole = server.complete(**body)
    assert whole.status_code == 200, whole.text
    choices = whole.json()["choices"]
    streamed = [""] * len(choices)
    for line in server.complete(**body, stream=True).text.split("\n\n")[:-2]:
        for choice in json.loads(line.removeprefix("data: "))["choices"]:
            streamed[choice["index"]] += choice["text"]
    assert streamed == [choice["text"] for choice in choices]
    ended = [choice["text"] for choice in choices if choice["finish_reason"] == "stop"]
    assert ended, choices
    return ended


@pytest.mark.parametrize("seed", [1, 2])
def test_every_sample_fits_its_schema(server, seed):
    for text in texts(server, response_format=FORMAT, seed=seed, temperature=1.5):
        jsonschema.validate(json.loads(text), SCHEMA)
    [text] = texts(server, guided_json=json.dumps(SCHEMA), temperature=0, n=1)
    jsonschema.validate(json.loads(text), SCHEMA)


def test_a_chat_answers_with_an_object(server):
    reply = server.openai.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "x"}],
        response_format={"type": "json_object"},
        max_tokens=400,
        seed=1,
        # The random model likes no quotation marks: end what it begins.
        logit_bias={str(ord('"')): 6, str(ord("}")): 9},
    )
    assert reply.choices[0].finish_reason == "stop"
    assert isinstance(json.loads(reply.choices[0].message.content), dict)


def test_expressions_choices_and_grammars(server):
    for text in texts(server, structured_outputs={"regex": "[ab]{3,5}c"}, seed=2):
        assert re.fullmatch("[ab]{3,5}c", text)
    for field in ({"structured_outputs": {"choice": ["yes", "né"]}}, {"guided_choice": ["yes", "né"]}):
        assert set(texts(server, **field, seed=3)) <= {"yes", "né"}
    for text in texts(server, guided_grammar='start: "1" ("+" "1")~2', seed=4):
        assert text == "1+1+1"


def test_a_text_that_is_cut_says_length(server):
    [choice] = server.complete(prompt="x", response_format=FORMAT, max_tokens=3, seed=1).json()["choices"]
    assert choice["finish_reason"] == "length"


@pytest.mark.parametrize(
    "options",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nonsense"}}}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "http://example.com/x"}}}},
        {"guided_regex": "("},
        {"guided_choice": []},
        {"guided_choice": [""]},
        {"guided_grammar": "start: other"},
        {"guided_json": "5"},
        {"guided_json": "{", "guided_regex": "a"},
        {"guided_regex": "a", "ignore_eos": True},
        {"guided_regex": "a", "min_tokens": 2},
        {"guided_regex": "a" * 70_000},
        {"guided_json": json.loads('{"a":' * 40 + "1" + "}" * 40)},
    ],
    ids=range(12),
)
def test_a_grammar_that_cannot_be_followed_is_refused_alone(server, options):
    reply = server.complete(prompt="x", **options)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["type"] == "invalid_request_error"


# ---------------------------------------------------------------------- the hook in engines of other kinds


def generate(**engine):
    """Three samples of a prompt, each held to the schema, by an engine of its own."""

    async def ask():
        async with AsyncLLM(
            "tiny", dtype="float64", **{"max_model_len": 256, "num_gpu_blocks_override": 256, **engine}
        ) as llm:
            hook = await Grammars(llm.get_tokenizer(), 320, (256,)).hook("json", json.dumps(SCHEMA), 4, 3)
            params = SamplingParams(n=3, max_tokens=80, seed=2, logits_hook=hook, temperature=1.2)
            output = await llm.generate("abcd", params)
            preemptions = output.metrics.num_preemptions
            return [(sample.text, sample.finish_reason) for sample in output.outputs], preemptions

    samples, preemptions = asyncio.run(ask())
    assert any(reason == "stop" for _, reason in samples)
    for text, reason in samples:
        assert reason == "length" or jsonschema.validate(json.loads(text), SCHEMA) is None
    return samples, preemptions


def test_the_same_text_with_overlap_and_after_preemptions():
    plain, _ = generate(async_scheduling=False)
    assert generate(async_scheduling=True) == (plain, 0)
    short = {"num_gpu_blocks_override": 32, "block_size": 4, "watermark": 0.0, "max_model_len": 100}
    for overlap in (False, True):
        samples, preemptions = generate(**short, async_scheduling=overlap)
        assert preemptions > 0
        assert samples == plain


def test_drafts_are_checked_against_the_grammar():
    speculation = {"method": "ngram", "num_speculative_tokens": 4, "adaptive": False, "prompt_lookup_min": 1}
    plain, _ = generate()
    assert generate(speculative_config=speculation | {"sampler": "coupled"})[0] == plain
    generate(speculative_config=speculation)


def test_a_hook_goes_where_its_tokens_are():
    """In any order: as after preemptions, in checks of drafts, for several samples."""
    from refimpl.tokenizer.tokenizer import byte_tokenizer

    grammars = Grammars(byte_tokenizer(320), 320, (256,))
    hook = asyncio.run(grammars.hook("regex", "(ab|ac)*d", 2, 2))

    def allowed(text, hook=hook):
        logits = hook(torch.tensor([7, 7, *text.encode()]), torch.zeros(320))
        return {chr(i) if i < 256 else i for i in logits.isfinite().nonzero().flatten().tolist()}

    walks = ["", "a", "ab", "aba", "a", "abac", "abacd", "", "ac", "acd", "ab", "abab", "ababac", "aba"]
    for text in walks:
        fresh = asyncio.run(grammars.hook("regex", "(ab|ac)*d", 2, 1))
        assert allowed(text) == allowed(text, fresh)
    assert allowed("") == {"a", "d"}
    assert allowed("a") == {"b", "c"}
    assert allowed("abd") == {256}
    assert len(allowed("abx")) == 320  # not in the grammar: a draft that is refused anyway
    assert allowed("ab") == {"a", "d"}
    assert isinstance(hook, GrammarHook)


def test_a_model_without_an_end_has_no_grammars():
    from refimpl.tokenizer.tokenizer import byte_tokenizer

    with pytest.raises(ApiError, match="no end-of-sequence token"):
        asyncio.run(Grammars(byte_tokenizer(320), 320, ()).hook("regex", "a", 0, 1))
