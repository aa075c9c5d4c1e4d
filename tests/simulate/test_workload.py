"""Workloads: lengths in their ranges and shares, arrivals with their statistics, the same for the same seed."""

import math
import statistics
from collections import Counter
from itertools import pairwise

import pytest

from refimpl.errors import ConfigError
from refimpl.simulate import TraceRequest, arrive, mixed
from refimpl.simulate.workload import NAMED


def test_ranges_are_kept_and_even():
    drawn = mixed("128-512/64-256", 20_000, seed=1)
    prompts, outputs = [r.prompt for r in drawn], [r.output for r in drawn]
    assert (min(prompts), max(prompts)) == (128, 512)
    assert (min(outputs), max(outputs)) == (64, 256)
    assert statistics.mean(prompts) == pytest.approx(320, rel=0.01)
    assert statistics.mean(outputs) == pytest.approx(160, rel=0.01)
    assert abs(statistics.correlation(prompts, outputs)) < 0.03


def test_choices_come_in_their_exact_shares_in_random_order():
    drawn = mixed("short-long", 300, seed=1)
    assert Counter(r.output for r in drawn) == {50: 200, 2_000: 100}
    assert {r.prompt for r in drawn} == {64}
    assert Counter(r.output for r in drawn[:60])[2_000] not in (0, 60)
    assert [r.output for r in drawn] != [r.output for r in mixed("short-long", 300, seed=2)]


def test_shares_that_do_not_divide_still_make_the_count():
    assert len(mixed("1/10*1,20*1,30*1", 100, seed=0)) == 100
    assert mixed("7/9", 3, seed=0) == [TraceRequest(0.0, 7, 9)] * 3


@pytest.mark.parametrize(
    "given", ["", "512", "0/5", "5/0", "9-3/5", "a/b", "5/5/5", "5/-3", "5/5*0", "5/5*x", "nope", "1.5/2"]
)
def test_other_lengths_are_refused_with_the_form(given):
    with pytest.raises(
        ConfigError, match=r"are not PROMPT/OUTPUT in tokens, each a number >= 1 .* or one of chat, short-long"
    ):
        mixed(given, 3, seed=0)


def test_every_named_mix_is_one():
    for name in NAMED:
        assert len(mixed(name, 10, seed=0)) == 10


def test_poisson_arrivals_have_their_mean_and_spread():
    times = [r.arrival for r in arrive(mixed("5/5", 20_001, seed=3), 8.0, seed=3)]
    gaps = [b - a for a, b in pairwise(times)]
    assert times[0] == 0
    assert min(gaps) >= 0
    assert statistics.mean(gaps) == pytest.approx(1 / 8, rel=0.02)
    assert statistics.pstdev(gaps) == pytest.approx(1 / 8, rel=0.03)  # an exponential law's is its mean
    assert sum(gap > 1 / 8 for gap in gaps) / len(gaps) == pytest.approx(math.exp(-1), abs=0.01)


def test_even_arrivals_and_all_at_once():
    listed = mixed("5/5", 4, seed=0)
    assert [r.arrival for r in arrive(listed, 2.0, seed=0, arrivals="even")] == [0.0, 0.5, 1.0, 1.5]
    for arrivals in ("poisson", "even"):
        assert {r.arrival for r in arrive(listed, math.inf, seed=0, arrivals=arrivals)} == {0.0}


def test_without_a_rate_times_are_kept_and_lengths_never_change():
    own = [TraceRequest(0.0, 5, 6), TraceRequest(3.5, 7, 8)]
    assert arrive(own, None, seed=0) == own
    assert [(r.prompt, r.output) for r in arrive(own, 1.0, seed=0)] == [(5, 6), (7, 8)]


def test_a_seed_means_the_same_requests():
    for seed in (0, 7, -1):
        assert arrive(mixed("chat", 50, seed), 3.0, seed) == arrive(mixed("chat", 50, seed), 3.0, seed)
    assert mixed("chat", 50, 0) != mixed("chat", 50, 1)
    assert arrive(mixed("7/7", 50, 0), 3.0, 0) != arrive(mixed("7/7", 50, 0), 3.0, 1)


@pytest.mark.parametrize("rate", [0, -1, math.nan, -math.inf])
def test_a_rate_that_is_none_is_refused(rate):
    with pytest.raises(ConfigError, match="it must be above 0"):
        arrive(mixed("5/5", 2, 0), rate, 0)


def test_other_arrivals_and_no_requests_are_refused():
    with pytest.raises(ConfigError, match="must be one of poisson, even"):
        arrive([], None, 0, arrivals="bursts")
    with pytest.raises(ConfigError, match="give 1 or more"):
        mixed("5/5", 0, 0)
