"""What sampling parameters are refused at the door, and that whatever goes wrong with one request stays with it."""

import json
import math

import msgspec
import pytest
import torch

from refimpl import LLM, Engine, EngineArgs, SamplingParams
from refimpl.errors import ConfigError, PromptError, SamplingParamsError
from refimpl.executor.model_free import ModelFreeExecutor
from refimpl.intake import Intake
from refimpl.logprobs import LOGPROB_FLOOR
from refimpl.models.tiny import tiny
from refimpl.outputs import Admission, Batch, SchedulerOutput
from refimpl.sampling.bad_words import ways_to_write
from refimpl.sampling_numbers import SamplingNumbers

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def greedy(**more):
    return msgspec.structs.replace(GREEDY, **more)


@pytest.fixture(scope="module")
def llm():
    with LLM("tiny", max_model_len=64, max_logprobs=400) as made:
        yield made


def finish(engine):
    finished = {}
    while engine.has_unfinished_requests():
        finished |= {output.request_id: output for output in engine.step() if output.finished}
    return finished


# ---------------------------------------------------------------------- refused at the door (F14, F18)


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"logit_bias": {191222: -100}}, "logit_bias names token id 191222, which is outside the vocabulary: .* 0 to 319"),
        ({"logit_bias": {5: 1, 320: 1}}, "logit_bias names token id 320"),
        ({"allowed_token_ids": [3, 320]}, "allowed_token_ids names token id 320"),
        ({"min_tokens": 10**9, "max_tokens": None}, "min_tokens is 1000000000, but at most 61 fit behind a prompt of 3"),
        ({"min_tokens": 62, "max_tokens": 10**9}, "min_tokens is 62, but at most 61 fit"),
        ({"logprobs": 401}, r"logprobs is 401, but this engine gives at most max_logprobs = 400"),
        ({"prompt_logprobs": 401}, "prompt_logprobs is 401"),
        ({"allowed_token_ids": [97], "bad_words": ["a"]}, "leave no token to draw"),
        ({"allowed_token_ids": [256], "min_tokens": 2, "ignore_eos": False}, "all tokens that may be drawn end the text"),
        ({"allowed_token_ids": [5, 7], "stop_token_ids": [7, 5], "min_tokens": 1}, "all tokens that may be drawn end"),
    ],
)
def test_what_does_not_fit_the_model_is_refused_alone(llm, params, said):
    llm.engine.add_request("other", [1, 2, 3], GREEDY)
    with pytest.raises(SamplingParamsError, match=said) as raised:
        llm.engine.add_request("bad", [1, 2, 3], SamplingParams(**({"max_tokens": 5, "ignore_eos": True} | params)))
    assert raised.value.request_id == "bad"
    assert finish(llm.engine)["other"].outputs[0].finish_reason == "length"


@pytest.mark.parametrize("prompt", [[320], [-1], [1, 191222]])
def test_prompts_outside_the_vocabulary_are_refused(llm, prompt):
    with pytest.raises(PromptError, match="outside the vocabulary"):
        llm.engine.add_request("bad", prompt, GREEDY)


@pytest.mark.parametrize("max_tokens", [1, 61, None, 10**9])
def test_limits_that_fit_are_answered(llm, max_tokens):
    [output] = llm.generate([[1, 2, 3]], greedy(max_tokens=max_tokens, min_tokens=1), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == min(max_tokens or 61, 61)


def test_a_prompt_that_fills_the_context_is_refused_for_its_length(llm):
    with pytest.raises(PromptError, match="at most 63 fit"):
        llm.engine.add_request("bad", [1] * 64, greedy(min_tokens=2))


def test_more_logprobs_than_the_engine_allows_are_refused():
    with LLM("tiny", max_model_len=32) as made:
        for name in ("logprobs", "prompt_logprobs"):
            with pytest.raises(SamplingParamsError, match=f"{name} is 21, .*max_logprobs = 20.*-1: no limit"):
                made.generate("a", SamplingParams(**{name: 21}), use_tqdm=False)
            with pytest.raises(SamplingParamsError, match=rf"{name} is -1 \(the whole vocabulary, 320\)"):
                made.generate("a", SamplingParams(**{name: -1}), use_tqdm=False)
    for wrong in (-2, 1.5, True):
        with pytest.raises(ConfigError, match="max_logprobs"):
            EngineArgs(max_logprobs=wrong)
    with pytest.raises(ConfigError, match="logits_hook is 5"):
        EngineArgs(logits_hook=5)


# ---------------------------------------------------------------------- extremes (F16, F17)


@pytest.mark.parametrize("dtype", ["float16", "float32", "bfloat16"])
def test_tiny_temperatures_and_filters_that_leave_one_token_are_greedy(dtype):
    one_left = [{"temperature": t} for t in (0, 1e-9, 1e-5, 1e-4)]
    one_left += [{"temperature": 1, **f} for f in ({"top_k": 1}, {"top_p": 0}, {"top_p": 1e-9}, {"min_p": 1})]
    all_left = [{"temperature": 1, "seed": 3, **f} for f in ({}, {"top_k": 0}, {"top_k": -1}, {"top_k": 321}, {"top_p": 1})]
    with LLM("tiny", dtype=dtype, max_model_len=32) as made:
        made.engine.executor.runner.model.lm_head.weight *= 3  # wide enough that the first two tokens never tie
        params = [SamplingParams(max_tokens=5, ignore_eos=True, **options) for options in one_left + all_left]
        outputs = made.generate([[1, 2, 3]] * len(params), params, use_tqdm=False)
    tokens = [tuple(output.outputs[0].token_ids) for output in outputs]
    assert {output.outputs[0].finish_reason for output in outputs} == {"length"}
    assert len(set(tokens[: len(one_left)])) == 1
    assert len(set(tokens[len(one_left) :])) == 1


# ---------------------------------------------------------------------- log-probabilities (F19, F20)


def test_a_cached_prefix_takes_nothing_from_prompt_logprobs(llm):
    llm.engine.reset_prefix_cache()
    prompt = [i * 7 % 250 for i in range(57)]
    before = llm.engine.prefix_cache_stats
    asked = greedy(prompt_logprobs=1, max_tokens=3)
    first, second = (llm.generate([prompt], asked, use_tqdm=False)[0] for _ in range(2))
    assert len(first.prompt_logprobs) == len(second.prompt_logprobs) == 57
    assert first.prompt_logprobs == second.prompt_logprobs
    assert llm.engine.prefix_cache_stats == before, "such a request does not look into the cache"
    plain = llm.generate([prompt], greedy(max_tokens=3), use_tqdm=False)[0]
    assert llm.engine.prefix_cache_stats.hits == before.hits + 48, "but it publishes what it computes"
    assert plain.prompt_logprobs is None
    assert plain.outputs[0].logprobs is plain.outputs[0].cumulative_logprob is None


def test_log_probabilities_are_json_whatever_the_logits():
    with LLM("tiny", max_model_len=64, max_logprobs=-1) as made:
        model = made.engine.executor.runner.model
        compute = model.compute_logits

        def half_forbidden(hidden):
            logits = compute(hidden)
            logits[:, 100:] = -math.inf
            return logits

        model.compute_logits = half_forbidden
        params = greedy(logprobs=-1, prompt_logprobs=-1, max_tokens=2)
        [output] = made.generate([[1, 200, 3]], params, use_tqdm=False)
    assert [len(entry) for entry in output.outputs[0].logprobs] == [320, 320]
    assert output.prompt_logprobs[1][200].logprob == LOGPROB_FLOOR
    text = json.dumps([msgspec.to_builtins(entry) for entry in output.prompt_logprobs], allow_nan=False)
    assert json.loads(text)[1]["200"]["logprob"] == LOGPROB_FLOOR
    assert sum(math.exp(one.logprob) for one in output.outputs[0].logprobs[0].values()) == pytest.approx(1, abs=1e-5)


def test_logprobs_0_is_the_token_alone_and_without_text_there_is_none(llm):
    params = [greedy(logprobs=0), greedy(logprobs=2), greedy(logprobs=2, detokenize=False)]
    alone, three, bare = (output.outputs[0] for output in llm.generate([[1, 2, 3]] * 3, params, use_tqdm=False))
    assert [list(entry) for entry in alone.logprobs] == [[i] for i in alone.token_ids]
    assert [len(entry) for entry in three.logprobs] == [2] * 6, "greedy: the token is one of the two"
    assert {one.decoded_token for entry in bare.logprobs for one in entry.values()} == {None}
    assert [entry[i].decoded_token for i, entry in zip(alone.token_ids, alone.logprobs, strict=True)] == [
        llm.get_tokenizer().token_text(i) for i in alone.token_ids
    ]


def test_a_prompt_of_one_token_has_no_log_probabilities(llm):
    [output] = llm.generate([[5]], greedy(prompt_logprobs=2), use_tqdm=False)
    assert output.prompt_logprobs == [None]


@pytest.mark.parametrize(
    "options", [{}, {"async_scheduling": True}, {"enable_kv_cache": False, "max_num_batched_tokens": 64}]
)
def test_prompt_logits_that_are_no_numbers_fail_their_request_alone(options):
    """All samples of it: those that wait for the prompt too."""
    engine = Engine(EngineArgs(model="tiny", **({"max_model_len": 64, "max_num_batched_tokens": 16} | options)))
    engine.executor.runner.model.embed_tokens[7] = math.nan
    engine.add_request("bad", [1, 7, *[3] * 30], greedy(prompt_logprobs=1, n=3))
    engine.add_request("good", [1, 2, 3], greedy(prompt_logprobs=1))
    finished = finish(engine)
    assert [sample.finish_reason for sample in finished["bad"].outputs] == ["error"] * 3
    assert all("are not numbers" in sample.stop_reason for sample in finished["bad"].outputs)
    assert finished["good"].outputs[0].finish_reason == "length"
    assert engine.audit() == []
    engine.close()


# ---------------------------------------------------------------------- bad words (F21)


def test_what_a_tokenizer_cannot_write_is_no_bad_word():
    tokenizer = tiny(vocab_size=5).tokenizer()
    assert ways_to_write("zebra", tokenizer) == []
    assert ways_to_write("b", tokenizer) == [(1,)]
    with LLM(tiny(vocab_size=5), max_model_len=32) as made:
        outputs = made.generate([[1, 2]], greedy(bad_words=["zebra", "b"], max_tokens=20), use_tqdm=False)
    assert 1 not in outputs[0].outputs[0].token_ids


def test_bad_words_are_not_generated(llm):
    """The letters a, b and the space are all that is drawn: without the filter the word comes at once."""
    allowed = {"allowed_token_ids": [97, 98, 32], "temperature": 1, "max_tokens": 60, "ignore_eos": True, "seed": 1}
    free, held = llm.generate(
        [[1], [1]], [SamplingParams(**allowed), SamplingParams(**allowed, bad_words=["ab", " b"])], use_tqdm=False
    )
    assert "ab" in free.outputs[0].text
    assert " b" in free.outputs[0].text
    assert "ab" not in held.outputs[0].text
    assert " b" not in held.outputs[0].text


def test_words_that_leave_nothing_end_their_request_with_the_reason(llm):
    """After an a nothing is left: a row can run dry in the middle of a text."""
    dry = SamplingParams(allowed_token_ids=[97], bad_words=["aaa"], temperature=0, max_tokens=9)
    bad, good = llm.generate([[1], [1]], [dry, GREEDY], use_tqdm=False)
    assert bad.outputs[0].token_ids == [97, 97]
    assert bad.outputs[0].finish_reason == "error"
    assert "no token is left to draw" in bad.outputs[0].stop_reason
    assert good.outputs[0].finish_reason == "length"


# ---------------------------------------------------------------------- hooks


def boom_at(length):
    def hook(token_ids, logits):
        if len(token_ids) == length:
            raise ValueError("boom")
        return logits

    return hook


@pytest.mark.parametrize("overlap", [False, True])
def test_a_hook_that_fails_ends_its_request_alone(overlap):
    engine = Engine(EngineArgs(model="tiny", max_model_len=64, async_scheduling=overlap))
    engine.add_request("raises", [1, 2, 3], greedy(logits_hook=boom_at(5)))
    engine.add_request("nan", [1, 2, 3], greedy(logits_hook=lambda ids, logits: logits * math.nan))
    engine.add_request("other shape", [1, 2, 3], greedy(logits_hook=lambda ids, logits: logits[1:]))
    engine.add_request("samples", [1, 2, 3], greedy(logits_hook=boom_at(3), n=2))
    engine.add_request("good", [1, 2, 3], GREEDY)
    both = finish(engine)
    assert [sample.finish_reason for sample in both["samples"].outputs] == ["error"] * 2
    finished = {name: output.outputs[0] for name, output in both.items() if name != "samples"}
    assert {name: sample.finish_reason for name, sample in finished.items()} == {
        "raises": "error", "nan": "error", "other shape": "error", "good": "length",
    }  # fmt: skip
    assert finished["raises"].token_ids == finished["good"].token_ids[:2]
    assert finished["raises"].stop_reason == "the logits hook hook raised ValueError('boom')"
    assert "NaN" in finished["nan"].stop_reason
    assert "shape (319,)" in finished["other shape"].stop_reason
    assert engine.audit() == []
    assert engine.executor.logits_hooks == {}, "hooks of ended requests are forgotten"
    engine.add_request("again", [1, 2, 3], GREEDY)
    assert finish(engine)["again"].outputs[0].token_ids == finished["good"].token_ids
    engine.close()


@pytest.mark.parametrize("overlap", [False, True])
def test_the_engines_hook_comes_first_for_every_request(overlap):
    calls = []

    def engine_hook(token_ids, logits):
        calls.append("engine")
        return logits.index_fill(0, torch.tensor([77], device=logits.device), 1e4)

    def request_hook(token_ids, logits):
        calls.append("request")
        assert logits[77] == 1e4
        return logits.index_fill(0, torch.tensor([78], device=logits.device), 1e5)

    with LLM("tiny", max_model_len=32, logits_hook=engine_hook, async_scheduling=overlap) as made:
        plain, hooked = made.generate([[1], [2]], [greedy(max_tokens=3), greedy(max_tokens=3, logits_hook=request_hook)])
    assert plain.outputs[0].token_ids == [77] * 3
    assert hooked.outputs[0].token_ids == [78] * 3
    assert calls.count("request") >= 3
    assert calls.count("engine") >= 6


def test_a_hook_of_an_aborted_request_is_forgotten():
    engine = Engine(EngineArgs(model="tiny", max_model_len=64, async_scheduling=True))
    engine.add_request("a", [1, 2, 3], greedy(logits_hook=lambda ids, logits: logits, n=2))
    assert len(engine.executor.logits_hooks) == 2
    engine.step()
    engine.abort("a")
    assert engine.executor.logits_hooks == {}
    assert finish(engine) == {}
    engine.close()


def test_a_hook_cannot_travel():
    admitted = (Admission(0, 0, (1,), 1, 0, seed=0, path=0, sampling=SamplingNumbers(hooked=True)),)
    output = SchedulerOutput(0, Batch(1, (0,), (0,), (1,)), admitted=admitted)
    with pytest.raises(TypeError, match="sequence 0 has a logits hook, which cannot be sent"):
        output.to_wire(0)
    checkpoint = tiny()
    elsewhere = ModelFreeExecutor(4).logits_hooks
    intake = Intake(checkpoint.tokenizer(), checkpoint.config, 64, EngineArgs(), lambda: 0.0, elsewhere)
    with pytest.raises(SamplingParamsError, match="logits_hook is given, but this engine computes in other processes"):
        intake.prepare("a", [1], greedy(logits_hook=boom_at(1)))


def test_all_numbers_travel():
    asked = SamplingNumbers(
        temperature=0.5, logit_bias=((1, 2.0),), allowed_token_ids=(1, 2), bad_word_ids=((3,), (4, 5)), min_tokens=2,
        ending_ids=(7,), logprobs=3, prompt_logprobs=None, return_logits=(1,), return_hidden_states=(2,),
    )  # fmt: skip
    admitted = (Admission(0, 0, (1, 2), 1, 0, seed=-5, path=9, reads_from=1, sampling=asked),)
    output = SchedulerOutput(0, Batch(1, (0,), (0,), (1,)), admitted=admitted)
    assert SchedulerOutput.from_wire(output.to_wire(0), known=output.batch).admitted == admitted


def test_what_was_read_is_not_kept_with_the_story_of_a_finished_request(llm):
    asked = greedy(logprobs=1, prompt_logprobs=1, return_logits=(0, 4), return_hidden_states=(1, 5), n=2)
    llm.engine.add_request("read", [1, 2, 3], asked)
    request = llm.engine._book.find("read")
    output = finish(llm.engine)["read"]
    assert [len(sample.logits) + len(sample.hidden_states) + len(sample.logprobs) for sample in output.outputs] == [10, 10]
    assert "finished" in llm.engine.explain("read")
    assert not request.prompt_logprobs
    assert not [*request.readings.logits, *request.readings.hidden_states]
    assert not any(one.logprobs or one.readings.logits or one.readings.hidden_states for one in request.sequences)


# ---------------------------------------------------------------------- the counter


def test_rows_that_needed_more_than_a_head_are_counted():
    """On a CPU; a kernel cuts rows of any shape the same way, and has nothing to count."""
    with LLM(tiny(vocab_size=2000), max_model_len=32, device="cpu") as made:
        sampler = made.engine.executor.runner.sampler
        made.generate([[1, 2]], SamplingParams(top_k=5, seed=1, max_tokens=4, ignore_eos=True), use_tqdm=False)
        assert (sampler.num_rows_beyond_head, sampler.num_rows_sorted) == (0, 0)
        flat = SamplingParams(top_p=0.99, temperature=1000, seed=1, max_tokens=4, ignore_eos=True)
        made.generate([[1, 2]], flat, use_tqdm=False)
        assert (sampler.num_rows_beyond_head, sampler.num_rows_sorted) == (4, 4)
