"""The number of drafts that pays: chosen by simulated costs and acceptance, over batches, as they change."""

import random
from itertools import pairwise

import pytest

from refimpl import LLM
from refimpl.executor.round_costs import measure_rounds
from refimpl.models.tiny import tiny
from refimpl.speculative.costs import RoundCosts
from refimpl.speculative.law import speedup
from refimpl.speculative.lengths import PROBE_AFTER, PROBE_ROWS, Acceptance, AdaptiveLength

LADDER = (1, 2, 3, 5, 8)
MEASURED = (1, 2, 4, 8, 16, 32, 64)


class Machine:
    """A step is bound by its weights up to ``ridge`` tokens, and by arithmetic beyond; a draft costs ``c`` at any batch."""

    def __init__(self, c=0.1, ridge=64.0, noise=0.0):
        self.c, self.ridge = c, ridge
        self.random = random.Random(0)
        self.noise = noise

    def step(self, tokens):
        return max(1.0, tokens / self.ridge) + 0.002 * tokens

    def seconds(self, size, K):
        return self.step(size * (K + 1)) + K * self.c * self.step(size) if K else self.step(size)

    def measured(self):
        def seen(seconds):
            return seconds * (1 + self.noise * self.random.random())

        rounds = [(size, K) for size in (1, 4, 16, 64) for K in LADDER]
        return RoundCosts(
            {size: seen(self.step(size)) for size in MEASURED},
            {size * (K + 1): seen(self.step(size * (K + 1))) for size, K in rounds},
            {size: {K: seen(K * self.c * self.step(size)) for K in LADDER} for size in (1, 4, 16, 64)},
        )

    def worth(self, size, K, alpha):
        """Tokens a second over those without drafts."""
        return speedup(alpha, K, self.c, self.step(size * (K + 1)) / self.step(size))


def serve(length, machine, size, alpha, steps, seed=0):
    """Tokens a second over those without drafts, and the numbers of drafts."""
    drawn = random.Random(seed)
    tokens = seconds = 0
    chosen = []
    for _ in range(steps):
        K, rows = length.choose(size)
        chosen.append(K)
        tokens += size
        for _ in range(rows if K else 0):
            accepted = next((i for i in range(K) if drawn.random() >= alpha), K)
            tokens += accepted
            length.observe(K, accepted)
        # the rows that draft nothing compute one token each
        seconds += machine.step(size + rows * K) + K * machine.c * machine.step(rows) if K else machine.step(size)
    return tokens / seconds * machine.step(size) / size, chosen


@pytest.mark.parametrize("alpha", [0.4, 0.75])
@pytest.mark.parametrize(("c", "ridge"), [(0.05, 100), (0.22, 64), (0.6, 64)])
def test_adaptive_never_costs_much_and_takes_what_there_is(alpha, c, ridge):
    for size in (1, 4, 12, 24, 40, 64):
        machine = Machine(c, ridge, noise=0.05)
        got, _ = serve(AdaptiveLength(8, machine.measured()), machine, size, alpha, 500)
        best = max(machine.worth(size, K, alpha) for K in (0, *LADDER))
        assert got >= 0.97, size
        assert got >= 0.9 * best, size


@pytest.mark.parametrize("alpha", [0.4, 0.75])
@pytest.mark.parametrize("ridge", [40, 64, 90])
def test_the_batch_from_which_nothing_pays_is_found_within_a_fifth(alpha, ridge):
    machine = Machine(0.1, ridge)

    def crossing(gain):
        return next((size for size in range(1, 129) if gain(size) < 1.0), 129)

    true = crossing(lambda size: max(machine.worth(size, K, alpha) for K in LADDER))
    length = AdaptiveLength(8, machine.measured())
    length.acceptance = Acceptance(8, alpha)
    found = crossing(lambda size: max(gain for K, gain in length.speed_ups(size).items() if K))
    assert 1 < true < 129
    assert abs(found - true) <= 0.2 * true


def test_it_falls_to_none_where_nothing_is_accepted_and_comes_back():
    machine = Machine()
    length = AdaptiveLength(8, machine.measured())
    _, chosen = serve(length, machine, 1, 0.8, 200)
    assert chosen[-1] >= 3
    got, chosen = serve(length, machine, 1, 0.02, 3000)
    assert chosen[60:].count(0) >= 0.97 * len(chosen[60:])
    assert got >= 0.97
    _, chosen = serve(length, machine, 1, 0.9, 2 * PROBE_AFTER[1])
    assert chosen[-1] >= 3, "acceptance returned, and was noticed"


def test_a_probe_is_of_few_rows_and_becomes_rare():
    machine = Machine(c=0.6)
    length = AdaptiveLength(8, machine.measured())
    steps = [length.choose(64) for _ in range(5) if not length.observe(1, 0)]
    assert steps[-1] == (0, 0)
    probes = []
    for step in range(8000):
        K, rows = length.choose(64)
        if K:
            assert (K, rows) == (1, PROBE_ROWS)
            probes.append(step)
            for _ in range(rows):
                length.observe(1, 0)
    waits = [later - sooner for sooner, later in pairwise(probes)]
    assert waits[0] == 2 * PROBE_AFTER[0]
    assert max(waits) == waits[-1] == PROBE_AFTER[1]


def test_the_choice_does_not_flicker():
    """At the border of two numbers, that which is chosen stays for long."""
    machine = Machine(0.1, 64)
    _, chosen = serve(AdaptiveLength(8, machine.measured()), machine, 16, 0.75, 3000)
    changes = sum(a != b for a, b in pairwise(chosen))
    assert changes < 60


def test_a_place_that_no_draft_came_to_is_as_the_one_before():
    acceptance = Acceptance(3)
    for _ in range(200):
        acceptance.observe(1, 1)
        acceptance.end_step()
    assert acceptance.rates() == pytest.approx([1.0] * 3, abs=0.02)
    for _ in range(200):
        acceptance.observe(3, 1)
        acceptance.end_step()
    first, second, third = acceptance.rates()
    assert first > 0.95
    assert second < 0.1
    assert third == pytest.approx(second)


def test_what_is_long_ago_counts_little_but_is_not_forgotten():
    acceptance = Acceptance(2)
    for _ in range(100):
        for _ in range(64):
            acceptance.observe(2, 0)
        acceptance.end_step()
    for _ in range(100_000):
        acceptance.end_step()
    assert acceptance.rates()[0] == pytest.approx(0, abs=0.01)
    acceptance.observe(1, 1)
    assert acceptance.rates()[0] == pytest.approx(0.2, abs=0.01)


def test_costs_between_measured_sizes_lie_on_lines_and_a_disturbed_point_counts_for_nothing():
    costs = RoundCosts({1: 1.0, 4: 1.0, 8: 5.0, 16: 2.0}, {2: 1.0, 10: 2.0}, {1: {1: 0.1, 5: 0.5}, 3: {1: 0.3, 5: 1.5}})
    assert costs.plain(4) == 1.0
    assert costs.plain(8) == 2.0, "not 5, as 16 take 2"
    assert costs.plain(6) == 1.5
    assert costs.v(1, 5) == 1.5, "6 tokens"
    assert costs.v(1, 1) == 1.0
    assert costs.c(2, 5) == pytest.approx(1.0 / 5)
    assert costs.round_over_step(2, 4) == pytest.approx(4 * 0.25 + 2.0), "of 4 drafts as of 5, the nearest"
    assert costs.round_over_step(1, 0) == 1.0
    assert costs.v(3, 5) == pytest.approx(3.0), "18 tokens, on the line through 2 and 10"


def test_a_round_is_measured_with_all_its_drafts_though_none_is_found(monkeypatch):
    monkeypatch.setattr("refimpl.executor.round_costs.ROUNDS", 1)
    config = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 40, "prompt_lookup_max": 40}
    with LLM(tiny(), speculative_config=config | {"adaptive": False}, max_num_seqs=2, max_model_len=128) as llm:
        runner, checked = llm.engine.executor.runner, []
        check = runner.speculation.check

        def seen(logits, *rest):
            checked.append(len(logits))
            return check(logits, *rest)

        monkeypatch.setattr(runner.speculation, "check", seen)
        costs = measure_rounds(runner, 3, (2, 2048))
        assert set(checked) == {2, 3, 4}, "one row of 1, 2 and 3 drafts"
        assert sorted(costs.step) == [1, 2]
        assert sorted(costs.check) == [2, 3, 4]
        assert not runner.speculation.measuring
