"""The probabilities that the sampler draws from are told as they are: they and the uniform number give its token."""

import math

import pytest
import torch
from adjust_support import rows_of
from asserts import assert_close

from refimpl.kernels.philox import Purpose, uniform
from refimpl.kernels.reference import kept_masses
from refimpl.outputs import BAD_LOGITS, NOTHING_LEFT
from refimpl.sampling.probabilities import probabilities
from refimpl.sampling.sampler import Sampler, draw

V = 700
ASKED = [
    {"temperature": 0.0},
    {},
    {"temperature": 0.6, "top_k": 5},
    {"top_p": 0.7},
    {"temperature": 1.7, "top_p": 0.999, "min_p": 1e-4},
    {"temperature": 0.9, "min_p": 0.05},
    {"frequency_penalty": 1.0, "repetition_penalty": 1.2, "top_k": 300},
    {"temperature": 0.0, "logit_bias": ((3, 100.0),)},
]


def case(asked, seed=0):
    random = torch.Generator().manual_seed(seed)
    sequences = [((1, 2, 3), (3, 3), asked[row % len(asked)]) for row in range(64)]
    return 3 * torch.randn(64, V, generator=random), rows_of(sequences, V)


@pytest.mark.parametrize("asked", [ASKED, ASKED[:1], ASKED[1:2]], ids=["of every kind", "greedy", "whole"])
def test_they_and_the_uniform_numbers_give_the_samplers_tokens(asked):
    logits, rows = case(asked)
    before = logits.clone()
    probs, failures = probabilities(logits, rows)
    u = uniform(rows.seed, rows.path, rows.position, Purpose.TARGET)
    assert draw(probs, u).tolist() == Sampler().sample(logits, rows).token_ids.tolist()
    assert torch.equal(logits, before)
    assert failures == {}


def test_they_are_the_definitions():
    """By a full sort in float64, up to the factor that filters leave."""
    logits, rows = case(ASKED[2:6])
    probs, _ = probabilities(logits, rows)
    scaled = (logits.double() - logits.double().amax(-1, keepdim=True)) / rows.temperature.double().unsqueeze(-1)
    masses = kept_masses(scaled, rows.top_k, rows.top_p, rows.min_p)
    assert_close(probs / probs.sum(-1, keepdim=True), masses / masses.sum(-1, keepdim=True), rtol=1e-5, atol=1e-9)


def test_greedy_rows_are_one_hot_at_the_lowest_of_a_tie():
    logits, rows = case(ASKED[:1])
    logits[:, [9, 400]] = 50.0
    probs, _ = probabilities(logits, rows)
    assert probs.sum(-1).unique().tolist() == [1]
    assert (probs[:, 9] == 1).all()


@pytest.mark.parametrize("asked", [ASKED[0], ASKED[1], ASKED[2]], ids=["greedy", "whole", "ranked"])
def test_a_spoilt_row_is_nan_and_an_emptied_one_zero(asked):
    sequences = [((1,), (), asked), ((1,), (), asked | {"allowed_token_ids": (5,)}), ((1,), (), asked)]
    rows = rows_of(sequences, V)
    logits = torch.zeros(3, V)
    logits[0, 7], logits[1, 5] = math.nan, -math.inf
    probs, _ = probabilities(logits, rows)
    assert probs[0].isnan().all()
    assert not probs[1].any()
    assert probs[2].sum() > 0
    assert Sampler().sample(logits, rows).token_ids[:2].tolist() == [BAD_LOGITS, NOTHING_LEFT]


def test_a_failing_hook_is_told_by_row():
    def hook(ids, logits):
        raise ValueError("no")

    rows = rows_of([((1,), (), {"hooked": True}), ((1,), (), {})], V, hooks={0: hook})
    _, failures = probabilities(torch.zeros(2, V), rows)
    assert list(failures) == [0]


def test_16_bits_are_widened():
    logits, rows = case(ASKED)
    assert probabilities(logits.bfloat16(), rows)[0].dtype == torch.float32
    assert probabilities(logits.double(), rows)[0].dtype == torch.float64
