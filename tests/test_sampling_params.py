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
        "seed": None,
        "max_tokens": 16,
        "stop_token_ids": (),
        "ignore_eos": False,
        "skip_special_tokens": True,
        "output_kind": "cumulative",
    }


BAD = {
    "n": [0, -1, 1025, 1.0, "2", None, True],
    "temperature": [-0.1, -1e-9, math.nan, math.inf, -math.inf, 1e39, 10**31, 10**400, "hot", None, True],
    "top_p": [-0.1, 1.0001, math.nan, math.inf, 10**400, "all", None, True],
    "top_k": [-2, 2**63, 1.0, math.nan, "5", None, True],
    "min_p": [-0.1, 1.0001, math.nan, math.inf, "none", None, True],
    "seed": [2**63, -(2**63) - 1, 1.0, "7", True],
    "max_tokens": [0, -1, 1.0, math.nan, "16", True],
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


GOOD = {
    "n": [1, 1024],
    "temperature": [0, 0.0, 1e-9, 1e-5, 1, 2.0, 1e30],
    "top_p": [0, 0.0, 1e-9, 1, 1.0],
    "top_k": [-1, 0, 1, 2**63 - 1],
    "min_p": [0, 1, 0.5],
    "seed": [None, 0, -1, -(2**63), 2**63 - 1],
    "max_tokens": [None, 1, 10**9, 10**30],
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


def test_an_unknown_parameter_is_refused_by_name():
    with pytest.raises(TypeError, match="top_pp"):
        SamplingParams(top_pp=0.5)


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
