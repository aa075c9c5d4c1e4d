"""Text through the whole engine: stop strings end samples exactly, whatever runs beside and ahead of them."""

from concurrent.futures import Future

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refimpl import Engine, EngineArgs, SamplingParams
from refimpl.executor.model_free import ModelFreeExecutor
from refimpl.outputs import NO_TOKEN, ModelRunnerOutput
from refimpl.tokenizer import byte_tokenizer, make_detokenizer

PROMPT = "The quick brown fox"
KINDS = {
    "plain": {},
    "overlap": {"async_scheduling": True},
    "chunks": {"max_num_batched_tokens": 8, "max_num_seqs": 8},
    "static": {"scheduler": "static"},
    "static, dropped, overlap": {"scheduler": "static", "static_drop_finished": True, "async_scheduling": True},
    "no cache": {"enable_kv_cache": False, "max_num_batched_tokens": 256},
    "tight": {"num_gpu_blocks_override": 16, "watermark": 0.0},
    "tight, overlap": {"num_gpu_blocks_override": 16, "watermark": 0.0, "async_scheduling": True},
}


def make(**options):
    args = {"model": "tiny", "num_gpu_blocks_override": 96, "block_size": 4, "max_model_len": 64, "dtype": "float64"}
    return Engine(EngineArgs(**args | options))


def drain(engine):
    """All outputs of each request, in order; audits after each step."""
    told = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            told.setdefault(output.request_id, []).append(output)
        assert engine.audit() == []
    return told


def generate(engine, *, prompt=PROMPT, request_id="a", **params):
    """The samples of one request, whole: (text, token ids, finish reason, stop reason)."""
    engine.add_request(request_id, prompt, SamplingParams(**{"output_kind": "final_only"} | params))
    [output] = drain(engine)[request_id]
    assert [len(times) for times in output.metrics.token_times] == [len(sample.token_ids) for sample in output.outputs]
    for sample in output.outputs if "logprobs" in params else ():
        assert [next(iter(found)) for found in sample.logprobs] == sample.token_ids
        assert sample.cumulative_logprob == sum(
            found[token].logprob for found, token in zip(sample.logprobs, sample.token_ids, strict=True)
        )
    return [(s.text, s.token_ids, s.finish_reason, s.stop_reason) for s in output.outputs]


PARAMS = {"n": 3, "seed": 7, "max_tokens": 24, "ignore_eos": True}


@pytest.fixture(scope="module")
def whole():
    """The samples without a stop string, and the length of each one's text after each of its tokens."""
    engine = make()
    samples = [(text, token_ids) for text, token_ids, _, _ in generate(engine, **PARAMS)]
    engine.close()
    return samples


def expected(whole, stop, include=False):
    """By brute force, from the whole text. Tokens are bytes: the one that completes the stop string is found by decoding."""
    found = []
    for text, token_ids in whole:
        ends = [(text.find(one) + len(one), number) for number, one in enumerate(stop) if one in text]
        if not ends:
            found.append((text, token_ids, "length", None))
            continue
        end, number = min(ends)
        certain, detokenizer = 0, make_detokenizer(byte_tokenizer(320), True)
        count = 0
        while certain < end:
            certain += len(detokenizer.append(token_ids[count]))
            count += 1
        kept = text[: end if include else end - len(stop[number])]
        found.append((kept, token_ids[:count], "stop", stop[number]))
    return found


def some_stops(whole):
    """Two stop strings that other samples do not hold at once, and one that none does."""
    first, second = whole[0][0], whole[1][0]
    return (first[9:12], "nowhere in the text", second[4:6])


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_stop_string_ends_its_sample_with_the_token_that_completes_it(kind, include, whole):
    stop = some_stops(whole)
    engine = make(**KINDS[kind])
    for other in range(3):  # they run beside it, and where blocks are tight it is preempted
        engine.add_request(f"other {other}", PROMPT[other:], SamplingParams(max_tokens=20, ignore_eos=True))
    samples = generate(engine, stop=stop, include_stop_str_in_output=include, **PARAMS)
    assert samples == expected(whole, stop, include)
    assert [sample[2] for sample in samples[:2]] == ["stop", "stop"]
    assert engine.scheduler.kv.num_free_blocks == engine.scheduler.kv.num_blocks
    assert engine._processor._streams == {}
    story = engine.explain("a")
    assert f"holds the stop string {samples[0][3]!r} in its text" in story
    assert f"finished with reason stop ({samples[0][3]!r}): {len(samples[0][1])} output tokens" in story
    engine.close()


@pytest.mark.parametrize("kind", ["plain", "overlap"])
def test_a_preempted_sample_goes_on_with_its_text(kind, whole):
    stop = some_stops(whole)
    engine = make(**KINDS[kind])
    for step in (2, 4, 7):
        engine.scheduler.preempt_at(engine.scheduler.step + step, "a")
        assert generate(engine, stop=stop, **PARAMS) == expected(whole, stop)
        assert "is preempted" in engine.explain("a")
    engine.close()


def test_overlap_leaves_the_same_in_the_cache_and_in_the_log(whole):
    seen = []
    for overlap in (False, True):
        engine = make(async_scheduling=overlap)
        samples = generate(engine, stop=some_stops(whole), logprobs=2, **PARAMS)
        again = generate(engine, request_id="b", stop=some_stops(whole), **PARAMS)
        contents = {content.key for content in engine.scheduler.kv.prefix_cache._contents.values()}
        records = list(engine.events.records)
        tokens = {}
        for record in records:
            for sequence_id, token_id in zip(record.sequence_ids, record.token_ids, strict=True):
                tokens.setdefault(sequence_id, []).extend([token_id] * (token_id >= 0))
        ends = sorted((finish.sequence_id, finish.reason) for record in records for finish in record.finished)
        told = [d.numbers["stop"] for record in records for d in record.decisions if d.kind == "stop_string"]
        seen.append((samples, again, contents, tokens, ends, sorted(told), engine.prefix_cache_stats))
        engine.close()
    assert seen[0] == seen[1]
    samples, again, _, tokens, ends, told, _ = seen[0]
    assert [tokens[i] for i in range(6)] == [sample[1] for sample in samples + again]
    assert told == sorted(sample[3] for sample in samples + again if sample[3])
    assert [reason for _, reason in ends] == [sample[2] for sample in samples + again]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("output_kind", ["delta", "cumulative"])
def test_what_is_told_is_never_taken_back(output_kind, overlap, whole):
    stop = some_stops(whole)
    engine = make(async_scheduling=overlap)
    engine.add_request("a", PROMPT, SamplingParams(output_kind=output_kind, stop=stop, **PARAMS))
    texts, tokens = [""] * 3, [[] for _ in range(3)]
    for output in drain(engine)["a"]:
        for sample in output.outputs:
            if output_kind == "delta":
                texts[sample.index] += sample.text
                tokens[sample.index] += sample.token_ids
            else:
                assert sample.text.startswith(texts[sample.index])
                texts[sample.index], tokens[sample.index] = sample.text, sample.token_ids
            assert not any(one in texts[sample.index] for one in stop)
    assert list(zip(texts, tokens, strict=True)) == [sample[:2] for sample in expected(whole, stop)]
    engine.close()


# ------------------------------------------------------------------ tokens by script


class Scripted(ModelFreeExecutor):
    """Draws the tokens of a script, by their place behind the prompt; what every sample of every request says."""

    def __init__(self, num_blocks):
        super().__init__(num_blocks)
        self.say()

    def say(self, tokens=(), prompt=1):
        self.tokens, self.prompt = list(tokens), prompt

    def run(self, scheduler_output):
        drawn = super().run(scheduler_output).token_ids
        rows = zip(drawn, scheduler_output.batch.slots, strict=True)
        return ModelRunnerOutput(tuple(d if d == NO_TOKEN else self.scripted(self.num_known(slot) - 1) for d, slot in rows))

    def scripted(self, position):
        place = position - self.prompt
        return self.tokens[place] if place < len(self.tokens) else ord("z")


def scripted(**options):
    engine = make(**options)
    engine._loop.executor = Scripted(engine.scheduler.kv.num_blocks)
    return engine


def say(engine, tokens, *, prompt=(120,), **params):
    """The one sample of a request that is answered with these tokens."""
    engine._loop.executor.say(tokens, len(prompt))
    [sample] = generate(engine, prompt=list(prompt), **{"max_tokens": len(tokens), "ignore_eos": True} | params)
    return sample


@pytest.fixture(scope="module", params=["plain", "overlap", "static"])
def engine(request):
    engine = scripted(**KINDS[request.param])
    yield engine
    assert engine.scheduler.kv.num_free_blocks == engine.scheduler.kv.num_blocks
    assert engine._processor._streams == {}
    engine.close()


@settings(deadline=None, max_examples=60)
@given(st.text("ab🙂", min_size=1, max_size=8), st.lists(st.text("ab🙂", min_size=1, max_size=3), min_size=1, max_size=3))
def test_any_text_ends_at_its_first_stop_string(engine, text, stop):
    tokens = list(text.encode())
    ends = [(text.find(one) + len(one), number) for number, one in enumerate(stop) if one in text]
    got = say(engine, tokens, stop=stop)
    if not ends:
        assert got == (text, tokens, "length", None)
    else:
        end, number = min(ends)
        assert got == (text[: end - len(stop[number])], list(text[:end].encode()), "stop", stop[number])


def test_a_stop_string_with_the_last_token_is_a_stop(engine):
    assert say(engine, b"xab", stop="ab") == ("x", [*b"xab"], "stop", "ab")
    assert say(engine, b"xab", stop="abc") == ("xab", [*b"xab"], "length", None)


def test_a_stop_string_that_only_the_end_shows(engine):
    """0xF0 could begin a character; at the end it is known to begin none."""
    assert say(engine, [120, 0xF0], stop="\ufffd") == ("x", [120, 0xF0], "stop", "\ufffd")
    assert "holds the stop string '\ufffd'" in engine.explain("a")
    assert say(engine, [120, 0xF0], stop="y") == ("x\ufffd", [120, 0xF0], "length", None)


def test_a_stop_string_does_not_count_before_min_tokens(engine):
    assert say(engine, b"xabab", stop="ab", min_tokens=3) == ("xab", [*b"xabab"], "stop", "ab")
    assert say(engine, b"xabab", stop="ab", min_tokens=2) == ("x", [*b"xab"], "stop", "ab")


def test_a_token_that_stops_by_its_id_has_no_text(engine):
    stop = {"stop_token_ids": [98], "stop": ["ax"]}
    assert say(engine, b"xabx", **stop) == ("xa", [*b"xab"], "stop", 98), "the a that was held back is said"
    assert say(engine, b"xabx", include_stop_str_in_output=True, **stop) == ("xab", [*b"xab"], "stop", 98)
    eos = engine.scheduler._eos_token_ids
    [eos_id] = eos
    shown = {"ignore_eos": False, "skip_special_tokens": False}
    assert say(engine, [120, eos_id], **shown) == ("x", [120, eos_id], "stop", None)
    assert say(engine, [120, eos_id, 121], skip_special_tokens=False) == ("x<|end|>y", [120, eos_id, 121], "length", None)
    assert say(engine, [120, eos_id, 121], stop="xy") == ("", [120, eos_id, 121], "stop", "xy"), "over a skipped token"


def test_an_output_goes_on_in_the_middle_of_a_character(engine):
    emoji = "🙂".encode()
    for cut in range(4):
        assert say(engine, [*emoji[cut:], 33], prompt=[104, *emoji[:cut]])[0] == "🙂!"
    assert say(engine, emoji[2:], prompt=[104, *emoji[:2]], stop="🙂")[0] == ""


def test_without_text_nothing_is_decoded(engine, monkeypatch):
    monkeypatch.setattr("refimpl.output_processor.TextStream", None)  # a call would raise
    for output_kind in ("final_only", "delta"):
        engine._loop.executor.say(b"abc")
        engine.add_request("a", [120], SamplingParams(max_tokens=3, detokenize=False, output_kind=output_kind))
        outputs = [output.outputs[0] for output in drain(engine)["a"]]
        assert [token for sample in outputs for token in sample.token_ids] == [*b"abc"]
        assert {sample.text for sample in outputs} == {""}


def test_held_back_text_comes_with_the_delta_that_tells_the_end(engine):
    engine._loop.executor.say(b"abac")
    params = SamplingParams(max_tokens=4, stop="abacus", output_kind="delta")
    engine.add_request("a", [120], params)
    samples = [output.outputs[0] for output in drain(engine)["a"]]
    assert [sample.token_ids for sample in samples] == [[97], [98], [97], [99]]
    assert [sample.text for sample in samples] == ["", "", "", "abac"]


def test_a_fork_goes_on_with_its_parents_text():
    """In the middle of a character, and with stop strings of its own text alone."""
    engine = scripted()
    script = [*"a🙂".encode(), *b"bcd"]
    engine._loop.executor.say(script)
    engine.add_request("a", [120], SamplingParams(max_tokens=8, ignore_eos=True, output_kind="final_only"))
    for _ in range(3):
        engine.step()
    engine.fork("a", "whole")
    engine.fork("a", "stopped", SamplingParams(max_tokens=5, stop=["🙂bc"], ignore_eos=True, output_kind="final_only"))
    told = {request_id: output.outputs[0] for request_id, [output] in drain(engine).items()}
    assert told["a"].text == "a🙂bcd"
    assert (told["whole"].text[:4], told["whole"].token_ids) == ("🙂bcd", [*script[3:], *b"zzz"])
    assert (told["stopped"].text, told["stopped"].token_ids) == ("", script[3:7])
    engine.close()


def test_an_error_says_what_was_held_back(monkeypatch):
    engine = scripted()
    engine._loop.executor.say([97, 0xF0])
    engine.add_request("a", [120], SamplingParams(max_tokens=8, stop="ab"))
    engine.step()
    engine.step()
    failed = Future()
    failed.set_exception(RuntimeError("the device fell over"))
    monkeypatch.setattr(engine._loop.executor, "submit", lambda output: failed)
    [sample] = drain(engine)["a"][-1].outputs
    assert (sample.text, sample.finish_reason) == ("a\ufffd", "error")
    engine.close()
