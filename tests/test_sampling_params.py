"""SamplingParams: vLLM's defaults, and every bad value refused by name."""

import math

import msgspec
import pytest

from refimpl import LLM, SamplingParams
from refimpl.errors import RequestError, SamplingParamsError


def test_defaults_are_vllms():
    assert msgspec.structs.asdict(SamplingParams()) == {
        "n": 1,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "logit_bias": None,
        "allowed_token_ids": None,
        "bad_words": (),
        "logits_hook": None,
        "seed": None,
        "max_tokens": 16,
        "min_tokens": 0,
        "stop": (),
        "stop_token_ids": (),
        "include_stop_str_in_output": False,
        "ignore_eos": False,
        "logprobs": None,
        "prompt_logprobs": None,
        "return_logits": (),
        "return_hidden_states": (),
        "detokenize": True,
        "skip_special_tokens": True,
        "output_kind": "cumulative",
    }


BAD = {
    "n": [0, -1, 1025, 1.0, "2", None, True],
    "temperature": [-0.1, -1e-9, math.nan, math.inf, -math.inf, 1e39, 10**31, 10**400, "hot", None, True],
    "top_p": [-0.1, 1.0001, math.nan, math.inf, 10**400, "all", None, True],
    "top_k": [-2, 2**63, 1.0, math.nan, "5", None, True],
    "min_p": [-0.1, 1.0001, math.nan, math.inf, "none", None, True],
    "presence_penalty": [-2.1, 2.1, math.nan, "much", None, True],
    "frequency_penalty": [-2.1, 2.1, math.inf, "much", None, True],
    "repetition_penalty": [0, -1, math.nan, math.inf, "much", None, True],
    "logit_bias": [[1], {"a": 1}, {-1: 1}, {1: math.nan}, {1: math.inf}, {1: "x"}, {1: None}, {1.5: 1}, {True: 1}, "5"],
    "allowed_token_ids": [(), [], 5, "5", [-1], [1.0], [True]],
    "bad_words": ["word", [""], [" "], ["a", "\n"], [5], 5],
    "logits_hook": [5, "hook", [], True],
    "seed": [2**63, -(2**63) - 1, 1.0, "7", True],
    "max_tokens": [0, -1, 1.0, math.nan, "16", True],
    "min_tokens": [-1, 1.0, None, "1", True],
    "logprobs": [-2, 1.0, "1", True],
    "prompt_logprobs": [-2, 1.0, "1", True],
    "return_logits": [5, [-1], [1.5], None],
    "return_hidden_states": [5, [-1], ["a"], None],
    "stop_token_ids": [5, "5", [-1], [1.0], ["a"], [True], {1}, None],
    "output_kind": ["all", "", None, 1],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD.items() for value in values])
def test_a_bad_value_is_refused_by_name(name, value):
    with pytest.raises(SamplingParamsError, match=rf"^{name} is .*; it must be ") as raised:
        SamplingParams(**{name: value})
    message = str(raised.value)
    assert repr(value) in message or isinstance(value, int | float)
    assert "\n" not in message
    assert isinstance(raised.value, RequestError)
    assert isinstance(raised.value, ValueError)


def keep(token_ids, logits):
    return logits


GOOD = {
    "n": [1, 1024],
    "temperature": [0, 0.0, 1e-9, 1e-5, 1, 2.0, 1e30],
    "top_p": [0, 0.0, 1e-9, 1, 1.0],
    "top_k": [-1, 0, 1, 2**63 - 1],
    "min_p": [0, 1, 0.5],
    "presence_penalty": [-2, 0, 2],
    "frequency_penalty": [-2.0, 0.5, 2],
    "repetition_penalty": [0.1, 1, 10],
    "logit_bias": [None, {3: -100}, {0: 1e-3, 5: 2.5}],
    "allowed_token_ids": [None, (3,), (3, 4, 3)],
    "bad_words": [(), ("a",), ("one", "two words")],
    "logits_hook": [None, keep],
    "seed": [None, 0, -1, -(2**63), 2**63 - 1],
    "max_tokens": [None, 1, 10**9, 10**30],
    "min_tokens": [0, 1, 2],
    "logprobs": [None, 0, 1, 20],
    "prompt_logprobs": [None, 0, 1, 20],
    "return_logits": [(), (0,), (1, 5, 10**9)],
    "return_hidden_states": [(), (0,), (1, 5, 10**9)],
    "stop_token_ids": [[], (), [0], (3, 3, 2**40)],
    "output_kind": ["cumulative", "delta", "final_only"],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in GOOD.items() for value in values])
def test_a_good_value_is_kept(name, value):
    kept = getattr(SamplingParams(**{name: value}), name)
    assert kept == (tuple(value) if name == "stop_token_ids" else value)


def test_numbers_become_floats():
    params = SamplingParams(temperature=1, top_p=1, min_p=0)
    assert [type(x) for x in (params.temperature, params.top_p, params.min_p)] == [float, float, float]


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("top_pp", "did you mean top_p or "),
        ("presence_penalities", "did you mean presence_penalty"),
        ("tempertaure", "did you mean temperature[?]"),
        ("foo", "the parameters are n, temperature, "),
    ],
)
def test_an_unknown_parameter_is_refused_and_the_nearest_are_named(name, hint):
    with pytest.raises(SamplingParamsError, match=rf"^unknown sampling parameter '{name}'; {hint}"):
        SamplingParams(**{name: 0.5})


def test_parameters_are_given_by_name():
    with pytest.raises(SamplingParamsError, match="names only"):
        SamplingParams(0.5)


def test_params_are_frozen_and_compared_by_value():
    params = SamplingParams(stop_token_ids=[1, 2])
    with pytest.raises(AttributeError):
        params.n = 2
    assert params == SamplingParams(stop_token_ids=(1, 2))
    with pytest.raises(SamplingParamsError):
        msgspec.structs.replace(params, n=0)


@pytest.mark.parametrize(("temperature", "greedy"), [(0, True), (0.99e-5, True), (1e-5, False), (1, False)])
def test_greedy(temperature, greedy):
    assert SamplingParams(temperature=temperature).greedy is greedy


def test_every_value_that_is_accepted_runs():
    with LLM("tiny", max_model_len=64) as llm:
        params = [
            SamplingParams(**{"max_tokens": 2, name: value})
            for name, values in GOOD.items()
            for value in values
            if value != 1024
        ]
        outputs = llm.generate(["hi"] * len(params), params, use_tqdm=False)
        assert {sample.finish_reason for output in outputs for sample in output.outputs} <= {"length", "stop"}
