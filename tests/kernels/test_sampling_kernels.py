"""The sampling kernels beside the sampler of the engine, bit for bit where they can be; the law's random numbers."""

import math

import pytest
import torch
from asserts import assert_close, assert_same
from kernel_device import DEVICE, triton

from refimpl import outputs, sampling_params
from refimpl.kernels import penalties, philox, reference, sampling
from refimpl.sampling.penalties import apply_penalties
from refimpl.sampling.sampler import Sampler, SamplingRows

tl = triton.language


@triton.jit
def uniform_kernel(seed, path, position, result, PURPOSE: tl.constexpr):
    row = tl.program_id(0)
    u = sampling.uniform(tl.load(seed + row), tl.load(path + row), tl.load(position + row), tl.full((), PURPOSE, tl.int32))
    tl.store(result + row, u)


@pytest.mark.parametrize("purpose", list(philox.Purpose))
def test_uniform_numbers_are_philoxs(purpose):
    generator = torch.Generator().manual_seed(1)
    seed, path = torch.randint(-(2**63), 2**63 - 1, (2, 7), generator=generator)
    position = torch.tensor([0, 1, 2, 2**31 - 1, 2**31, 2**32 - 1, 77])
    result = torch.full((7,), math.nan, dtype=torch.float64, device=DEVICE)
    uniform_kernel[(7,)](seed.to(DEVICE), path.to(DEVICE), position.to(DEVICE), result, PURPOSE=int(purpose))
    assert_same(result.cpu(), philox.uniform(seed, path, position, purpose))


def test_constants_are_the_engines():
    assert reference.GREEDY_BELOW == sampling_params.GREEDY_BELOW
    assert (reference.BAD_LOGITS, reference.NOTHING_LEFT) == (outputs.BAD_LOGITS, outputs.NOTHING_LEFT)


def rows_of(R, V, seed, **fixed):
    """Logits and random parameters of rows; ``fixed`` ones are the same in all."""
    generator = torch.Generator().manual_seed(seed)
    parameters = {
        "temperature": torch.rand(R, generator=generator) + 0.3,
        "top_p": torch.rand(R, generator=generator) * 0.5 + 0.5,
        "top_k": torch.randint(1, V, (R,), generator=generator),
        "min_p": torch.rand(R, generator=generator) * 0.05,
        "seed": torch.randint(0, 2**62, (R,), generator=generator),
        "path": torch.randint(0, 2**62, (R,), generator=generator),
        "position": torch.randint(0, 4096, (R,), generator=generator),
    }
    parameters |= {name: torch.full_like(parameters[name], value) for name, value in fixed.items()}
    return torch.randn(R, V, generator=generator) * 3, parameters


def sampling_rows(parameters):
    top_k = parameters["top_k"]
    most = int(top_k.max())
    return SamplingRows(**parameters, whole=[], ranked=list(range(len(top_k))), min_p_on=True, largest_top_k=most)


def both(logits, parameters):
    """The tokens of the engine's sampler and of the kernel."""
    rows = sampling_rows(parameters)
    on_device = {name: value.to(DEVICE) for name, value in parameters.items()}
    token_ids, _ = sampling.sample(logits.to(DEVICE), purpose=philox.Purpose.TARGET, **on_device)
    return Sampler().sample(logits, rows).token_ids, token_ids.cpu()


FILTERS = {
    "top_k": {"top_p": 1.0, "min_p": 0.0},
    "top_p": {"top_k": 0, "min_p": 0.0},
    "min_p": {"top_k": -1, "top_p": 1.0},
    "all": {},
    "one": {"top_k": 1},
    "least": {"top_p": 1e-6},
    "cold": {"temperature": 2e-5},
    "none": {"top_k": 0, "top_p": 1.0, "min_p": 0.0},
}


@pytest.mark.parametrize("name", FILTERS)
def test_tokens_are_those_of_the_engines_sampler(name):
    expected, got = both(*rows_of(3, 120, seed=5, **FILTERS[name]))
    assert got.tolist() == expected.tolist()


@pytest.mark.parametrize("name", ["top_k", "top_p", "all"])
def test_of_tokens_that_tie_the_first_stay(name):
    """Three values only, so that every cut falls among ties."""
    logits, parameters = rows_of(3, 90, seed=2, **FILTERS[name])
    expected, got = both(logits.sign().mul(2).round(), parameters)
    assert got.tolist() == expected.tolist()


def test_reference_is_the_sampler():
    """The twin's definition by a full sort draws what the engine draws, over many rows."""
    logits, parameters = rows_of(300, 50, seed=9)
    token_ids, logprobs = reference.sample(logits, purpose=philox.Purpose.TARGET, **parameters)
    assert token_ids.tolist() == Sampler().sample(logits, sampling_rows(parameters)).token_ids.tolist()
    assert_close(
        logprobs, logits.double().log_softmax(-1).gather(-1, token_ids.unsqueeze(-1)).flatten(), rtol=1e-6, atol=1e-5
    )


def test_greedy_takes_the_lowest_id_of_those_that_tie():
    logits = torch.zeros(1, sampling.TILE + 5)
    logits[0, [7, 9, sampling.TILE + 1]] = 2.0
    _, parameters = rows_of(1, 8, seed=0, temperature=0.0)
    words = {name: parameters[name].to(DEVICE) for name in ("temperature", "seed", "path", "position")}
    token_ids, logprobs = sampling.sample(logits.to(DEVICE), purpose=0, **words)
    assert token_ids.tolist() == [7]
    assert_close(logprobs.cpu(), logits.log_softmax(-1)[:, 7], rtol=1e-6, atol=1e-6)


def test_one_spoilt_row_leaves_the_others_alone():
    logits, parameters = rows_of(5, 64, seed=4, **FILTERS["none"])
    expected, _ = both(logits, parameters)
    spoilt = logits.clone()
    spoilt[1, 3], spoilt[2, 60], spoilt[3] = math.nan, math.inf, -math.inf
    words = {name: parameters[name].to(DEVICE) for name in ("temperature", "seed", "path", "position")}
    alone, _ = sampling.sample(spoilt.to(DEVICE), purpose=0, **words)
    assert alone.tolist() == [expected[0], *[outputs.BAD_LOGITS] * 3, expected[4]]
    adjusted, logprobs = sampling.sample(spoilt.to(DEVICE), purpose=0, raw=logits.to(DEVICE), **words)
    assert adjusted.tolist() == [expected[0], *[outputs.NOTHING_LEFT] * 3, expected[4]]
    assert logprobs.isnan().tolist() == [False, True, True, True, False]


def test_penalties_are_the_engines_bit_for_bit_and_leave_the_counts_clear():
    spec = penalties.SPECS[0]
    case = spec.make_case({"R": 4, "V": 60, "A": 3, "L": 30}, torch.float32, torch.device("cpu"), 1)
    inputs = case.inputs
    clean = inputs["token_ids"].clamp(max=59)
    expected = inputs["logits"].clone()
    texts = [clean] + [inputs[name] for name in ("num_prompt_tokens", "num_tokens", "presence", "frequency", "repetition")]
    expected[inputs["rows"]] = apply_penalties(expected[inputs["rows"]], *texts)
    assert_same(reference.penalise(**inputs), expected)
    counts = case.out["counts"].to(DEVICE)
    got = penalties.penalise(**{name: value.to(DEVICE) for name, value in inputs.items()}, counts=counts)
    assert_same(got.cpu(), expected)
    assert not counts.any()
