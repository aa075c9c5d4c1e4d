"""Logits hooks: what they are given, in which order they come, and that what they do wrong stays in their row."""

import math
import re

import pytest
import torch
from adjust_support import adjusted, rows_of

from refimpl.outputs import NOTHING_LEFT
from refimpl.sampling.sampler import Sampler

V = 10
LOGITS = torch.arange(2 * V, dtype=torch.float32).view(2, V)
HOOKED = [([1, 2], [3], {"hooked": True}), ([4], [], {})]


def through(hook, **options):
    return adjusted(LOGITS.clone(), HOOKED, hooks={0: hook}, **options)


def test_a_hook_is_given_its_rows_tokens_and_logits():
    seen = []

    def hook(token_ids, logits):
        seen.append((token_ids.tolist(), logits.tolist(), logits.dtype))
        return logits * 2

    got, failures = through(hook)
    assert seen == [([1, 2, 3], LOGITS[0].tolist(), torch.float32)]
    assert got.tolist() == [(LOGITS[0] * 2).tolist(), LOGITS[1].tolist()]
    assert failures == {}


def test_a_hook_may_write_into_what_it_is_given():
    def hook(token_ids, logits):
        token_ids.fill_(0)
        logits[3] = 99
        return logits

    rows = rows_of(HOOKED, V, hooks={0: hook})
    before = rows.adjustments.token_ids.clone()
    assert Sampler().sample(LOGITS, rows).token_ids[0] == 3
    assert torch.equal(rows.adjustments.token_ids, before)
    assert LOGITS[0, 3] == 3


def test_a_hook_that_only_writes_without_returning_fails():
    _, failures = through(lambda token_ids, logits: None)
    assert failures == {0: "the logits hook <lambda> returned a NoneType; it must return float32 logits of shape (10,)"}


def test_the_engines_hook_comes_first_and_sees_every_row():
    got, _ = through(lambda _, logits: logits * 10, engine_hook=lambda _, logits: logits + 1)
    assert got.tolist() == [((LOGITS[0] + 1) * 10).tolist(), (LOGITS[1] + 1).tolist()]


def test_a_hook_comes_after_the_penalties():
    asked = {"hooked": True, "presence_penalty": 2.0}
    got, _ = adjusted(LOGITS.clone(), [([1], [3], asked), *HOOKED[1:]], hooks={0: lambda _, logits: logits * 10})
    assert got[0, 3] == (3 - 2) * 10


class Boom:
    """A hook that is an object."""

    def __call__(self, token_ids, logits):
        raise KeyError("boom")


@pytest.mark.parametrize(
    ("hook", "said"),
    [
        (Boom(), r"the logits hook Boom raised KeyError\('boom'\)"),
        (lambda ids, logits: logits[:5], r"returned float32 of shape \(5,\)"),
        (lambda ids, logits: logits[None], r"returned float32 of shape \(1, 10\)"),
        (lambda ids, logits: logits.double(), r"returned float64 of shape \(10,\)"),
        (lambda ids, logits: logits.long(), r"returned int64"),
        (lambda ids, logits: logits.tolist(), r"returned a list"),
        (lambda ids, logits: logits * math.nan, r"returned NaN or \+inf"),
        (lambda ids, logits: logits + math.inf, r"returned NaN or \+inf"),
        (lambda ids: ids, r"raised TypeError"),
    ],
)
def test_a_wrong_hook_fails_its_row_alone(hook, said):
    rows = rows_of(HOOKED, V, hooks={0: hook})
    sampled = Sampler().sample(LOGITS, rows)
    [(row, text)] = sampled.failures.items()
    assert row == 0
    assert re.search(said, text), text
    assert sampled.token_ids[1] >= 0


def test_a_hook_that_forbids_everything_leaves_nothing():
    rows = rows_of(HOOKED, V, hooks={0: lambda ids, logits: torch.full_like(logits, -math.inf)})
    sampled = Sampler().sample(LOGITS, rows)
    assert sampled.token_ids[0] == NOTHING_LEFT
    assert sampled.token_ids[1] >= 0
    assert sampled.failures == {}
