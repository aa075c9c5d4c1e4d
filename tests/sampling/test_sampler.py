"""The sampler: greedy rows, hot and cold ones, rows that are no numbers, independence from the batch, and the law."""

import math

import pytest
import torch
from asserts import ERROR_RATE, assert_close, assert_same, chi_square_p

from refimpl.kernels.philox import Purpose, branch, uniform
from refimpl.outputs import BAD_LOGITS
from refimpl.sampling.filters import top_k_top_p_filter
from refimpl.sampling.sampler import Sampler, SamplingRows, draw, tempered
from refimpl.sampling_params import GREEDY_BELOW

INF = math.inf


def make_rows(count, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, seed=0, path=0, position=0):
    """The parameters of ``count`` rows; each is one value for all, or a list."""

    def column(value, dtype):
        return torch.as_tensor(value, dtype=dtype).expand(count).contiguous()

    random = column(temperature, torch.float64) >= GREEDY_BELOW
    top_p, top_k, min_p = column(top_p, torch.float32), column(top_k, torch.int64), column(min_p, torch.float32)
    ranked = (top_p < 1) | (top_k > 0)
    return SamplingRows(
        temperature=column(temperature, torch.float32),
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=column(seed, torch.int64),
        path=column(path, torch.int64),
        position=column(position, torch.int64),
        whole=(random & ~ranked).nonzero().flatten().tolist(),
        ranked=(random & ranked).nonzero().flatten().tolist(),
        min_p_on=bool((min_p > 0).any()),
        largest_top_k=int(top_k.max()),
    )


def sample(logits, rows):
    return Sampler().sample(logits, rows).token_ids


def probabilities(logits, rows):
    """The definition of what is drawn from, over the whole vocabulary."""
    return top_k_top_p_filter(tempered(logits, rows), rows.top_k, rows.top_p).softmax(-1)


def numbers(rows):
    return uniform(rows.seed, rows.path, rows.position, Purpose.TARGET)


def random_logits(count, V, seed=0, scale=3.0):
    return torch.randn(count, V, generator=torch.Generator().manual_seed(seed)) * scale


# ---------------------------------------------------------------------- temperatures


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("temperature", [0.0, 1e-9, 1e-5, 1e-4, 1e-3])
def test_tiny_temperatures_are_the_argmax(temperature, dtype):
    logits = torch.tensor([[11.06, 2.0, 1.0], [1.0, 2.0, 11.06], [-3.0, 60_000.0, 59_000.0]], dtype=dtype)
    rows = make_rows(3, temperature=temperature, seed=[1, 2, 3], position=torch.arange(3))
    assert sample(logits, rows).tolist() == [0, 2, 1]
    if temperature >= GREEDY_BELOW:
        assert_same(probabilities(logits.float(), rows), torch.eye(3)[[0, 2, 1]])


@pytest.mark.parametrize("temperature", [0.1, 0.5, 1.0, 1.5, 2.0, 100.0, 1e30])
def test_temperature_divides_the_logits(temperature):
    logits = random_logits(8, 50)
    got = probabilities(logits, make_rows(8, temperature=temperature))
    assert_close(got, (logits.double() / temperature).softmax(-1), rtol=1e-4, atol=1e-7)
    assert_close(got.sum(-1), torch.ones(8), rtol=1e-6, atol=0)


@pytest.mark.parametrize("temperature", [1e-5, 1.0, 1e30])
def test_extreme_logits_give_a_distribution(temperature):
    logits = torch.tensor([[3e38, -3e38, 0.0, -INF], [1e-30, 0.0, -1e-30, -INF], [-3e38, -3e38, -INF, -INF]])
    got = probabilities(logits, make_rows(3, temperature=temperature))
    assert_close(got.sum(-1), torch.ones(3), rtol=1e-6, atol=0)
    assert (got[:, 3] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_logits_are_computed_with_in_float32(dtype):
    logits = random_logits(300, 500).to(dtype)
    rows = make_rows(300, temperature=0.7, top_p=0.95, position=torch.arange(300))
    assert_same(sample(logits, rows), sample(logits.float(), rows))


def test_greedy_takes_the_lowest_id_of_a_tie():
    V = 1000
    logits = torch.zeros(4, V)
    logits[1, 700:] = 1.0
    logits[2, [3, 999]] = 5.0
    logits[3, 1:] = -0.0
    assert sample(logits, make_rows(4, temperature=0.0)).tolist() == [0, 700, 3, 0]


def test_greedy_and_random_rows_in_one_batch():
    logits = random_logits(6, 30)
    mixed = sample(logits, make_rows(6, temperature=[0, 1, 0, 2, 1e-6, 0.5], seed=4, position=torch.arange(6)))
    hot = sample(logits, make_rows(6, temperature=[1, 1, 1, 2, 1, 0.5], seed=4, position=torch.arange(6)))
    assert mixed[[0, 2, 4]].tolist() == logits.argmax(-1)[[0, 2, 4]].tolist()
    assert mixed[[1, 3, 5]].tolist() == hot[[1, 3, 5]].tolist()


# ---------------------------------------------------------------------- filters in the sampler


@pytest.mark.parametrize("options", [{"top_k": 1}, {"top_p": 0.0}, {"top_p": 1e-9}, {"min_p": 1.0}])
def test_filters_that_leave_one_token(options):
    logits = random_logits(200, 40)
    assert sample(logits, make_rows(200, seed=torch.arange(200), **options)).tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize("options", [{"top_k": 0}, {"top_k": -1}, {"top_k": 41}, {"top_p": 1.0}, {"min_p": 0.0}])
def test_filters_that_are_off_draw_what_none_draws(options):
    logits = random_logits(200, 40)
    plain = sample(logits, make_rows(200, seed=torch.arange(200)))
    assert sample(logits, make_rows(200, seed=torch.arange(200), **options)).tolist() == plain.tolist()
    # A neighbour's filter makes all rows pass through the filters: the others still draw the same.
    rows = make_rows(200, seed=torch.arange(200), min_p=[0.9] + [0.0] * 199)
    assert sample(logits, rows)[1:].tolist() == plain[1:].tolist()


@pytest.mark.parametrize("options", [{"top_p": 0.95}, {"top_k": 50}, {"top_k": 300, "top_p": 0.7, "min_p": 1e-3}], ids=str)
@pytest.mark.parametrize("scale", [0.2, 3.0, 8.0])
def test_candidates_alone_give_the_tokens_of_the_whole_vocabulary(options, scale):
    """The head of a ranking, a longer one, a full sort: the same token for the same number, by the definition's sums."""
    count, V = 600, 5000
    logits = random_logits(20, V, seed=11, scale=scale).repeat(count // 20, 1)
    rows = make_rows(count, temperature=0.8, position=torch.arange(count), **options)
    scaled = tempered(logits, rows)
    stays = top_k_top_p_filter(scaled, rows.top_k, rows.top_p) > -INF
    assert sample(logits, rows).tolist() == draw(scaled.softmax(-1) * stays, numbers(rows)).tolist()


def test_filters_come_after_the_temperature():
    logits = torch.tensor([[4.0, 2.0, 0.0]])
    hot = probabilities(logits, make_rows(1, temperature=2.0, min_p=math.exp(-1) - 0.01))
    cold = probabilities(logits, make_rows(1, temperature=1.0, min_p=math.exp(-1) - 0.01))
    assert (hot > 0).tolist() == [[True, True, False]]
    assert (cold > 0).tolist() == [[True, False, False]]


# ---------------------------------------------------------------------- rows that are no numbers

BAD_ROWS = {
    "nan": [0.0, math.nan, 1.0],
    "all nan": [math.nan] * 3,
    "+inf": [0.0, INF, 1.0],
    "+inf and -inf": [INF, -INF, 0.0],
    "nan and -inf": [math.nan, -INF, -INF],
    "all -inf": [-INF] * 3,
}


@pytest.mark.parametrize("bad", BAD_ROWS.values(), ids=BAD_ROWS.keys())
@pytest.mark.parametrize(
    "options", [{"temperature": 0.0}, {}, {"top_k": 2, "top_p": 0.9, "min_p": 0.1}, {"temperature": 1e-5}], ids=str
)
def test_a_row_of_no_numbers_fails_alone(bad, options):
    good = [[1.0, -INF, 2.0], [0.5, 0.25, -1.0]]
    rows = make_rows(3, seed=9, position=torch.arange(3), **options)
    with_bad = sample(torch.tensor([good[0], bad, good[1]]), rows).tolist()
    with_good = sample(torch.tensor([good[0], good[0], good[1]]), rows).tolist()
    assert with_bad[1] == BAD_LOGITS
    assert [with_bad[0], with_bad[2]] == [with_good[0], with_good[2]]


def test_the_arguments_are_not_changed():
    logits = random_logits(5, 20)
    before, rows = logits.clone(), make_rows(5, top_k=3, temperature=[0, 1, 1, 1, 1])
    sample(logits, rows)
    assert_same(logits, before)
    assert rows.temperature.tolist() == [0, 1, 1, 1, 1]


# ---------------------------------------------------------------------- what a draw depends on


def test_a_draw_is_the_inverse_of_the_cumulative_distribution():
    weights = [0.1, 0.0, 0.4, 0.25, 0.0, 0.25]
    count = 2000
    rows = make_rows(count, seed=3, position=torch.arange(count))
    u = numbers(rows)
    got = draw(torch.tensor([weights]).expand(count, -1).contiguous(), u)
    for token, number in zip(got.tolist(), u.tolist(), strict=True):
        below = sum(weights[:token])
        assert below - 1e-6 <= number < below + weights[token] + 1e-6
        assert weights[token] > 0


def test_on_an_edge_the_next_token_is_drawn():
    """A number equal to the mass of the first tokens does not fall on them: a token of mass m has [below, below + m)."""
    u = numbers(make_rows(50, position=torch.arange(50)))
    assert draw(torch.stack((u, torch.zeros(50).double(), 1 - u), dim=1), u).tolist() == [2] * 50


def test_the_first_and_the_last_token_are_not_drawn_at_probability_0():
    count = 5000
    rows = make_rows(count, position=torch.arange(count))
    got = draw(torch.tensor([[0.0, 1e-6, 1.0, 0.0]]).expand(count, -1).contiguous(), numbers(rows))
    assert set(got.tolist()) <= {1, 2}


def test_a_draw_does_not_depend_on_its_batch():
    count, V = 60, 100
    logits = random_logits(count, V)
    options = {
        "temperature": torch.linspace(0, 2, count),
        "top_p": torch.linspace(0.3, 1, count),
        "top_k": torch.arange(count) % 7,
        "min_p": torch.linspace(0, 0.2, count),
        "seed": torch.arange(count) - 30,
        "path": torch.tensor([branch(0, i % 4) for i in range(count)]),
        "position": torch.arange(count) * 13,
    }
    together = sample(logits, make_rows(count, **options)).tolist()

    def drawn(chosen):
        return sample(logits[chosen], make_rows(len(chosen), **{k: v[chosen] for k, v in options.items()})).tolist()

    assert [drawn([i])[0] for i in range(count)] == together
    order = torch.randperm(count, generator=torch.Generator().manual_seed(5)).tolist()
    assert drawn(order) == [together[i] for i in order]
    assert drawn(order[:17]) == [together[i] for i in order[:17]]


def test_seed_path_and_position_each_give_other_draws():
    logits = torch.zeros(64, 1000)
    base = sample(logits, make_rows(64, position=torch.arange(64))).tolist()
    for other in ({"seed": 1}, {"path": branch(0, 1)}, {"position": torch.arange(64) + 64}):
        drawn = sample(logits, make_rows(64, **{"position": torch.arange(64), **other})).tolist()
        assert sum(a == b for a, b in zip(base, drawn, strict=True)) < 5  # 1 in 1,000 by chance


# ---------------------------------------------------------------------- the law


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.3},
        {"temperature": 2.0},
        {"top_k": 5},
        {"top_p": 0.8},
        {"min_p": 0.05},
        {"temperature": 1.5, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    ],
    ids=str,
)
@pytest.mark.parametrize("axis", ["position", "seed", "path"])
def test_tokens_are_drawn_by_the_filtered_probabilities(options, axis):
    """Chi-square of 50,000 draws against the distribution, worked out here in float64. Error rate ``ERROR_RATE``."""
    count, V = 50_000, 32
    logits = random_logits(1, V, seed=7, scale=1.5)
    along = torch.arange(count) if axis != "path" else torch.tensor([branch(0, i) for i in range(count)])
    rows = make_rows(count, **{"seed": 17, axis: along}, **options)
    counts = torch.bincount(sample(logits.expand(count, -1).contiguous(), rows), minlength=V)
    expected = plain_distribution(logits[0].tolist(), **options)
    assert chi_square_p(counts, torch.tensor(expected, dtype=torch.float64) * count) > ERROR_RATE


def plain_distribution(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """Temperature, min-p, top-k, top-p, by the words of their definitions."""
    scaled = [x / temperature for x in logits]
    weights = {i: math.exp(x - max(scaled)) for i, x in enumerate(scaled)}
    weights = {i: w for i, w in weights.items() if w >= min_p}
    ranked = sorted(weights, key=lambda i: -weights[i])[: top_k or None]
    total, mass, head = sum(weights[i] for i in ranked), 0.0, []
    for i in ranked:
        head.append(i)
        mass += weights[i] / total
        if mass >= top_p:
            break
    total = sum(weights[i] for i in head)
    return [weights[i] / total if i in head else 0.0 for i in range(len(logits))]


def test_neighbouring_tokens_are_independent():
    """Pairs of draws at positions p and p + 1 follow the product law."""
    count, weights = 100_000, torch.tensor([0.5, 0.3, 0.2])
    rows = make_rows(count, seed=23, position=torch.arange(count))
    drawn = draw(weights.expand(count, -1).contiguous(), numbers(rows))
    pairs = torch.bincount(drawn[0::2] * 3 + drawn[1::2], minlength=9)
    assert chi_square_p(pairs, torch.outer(weights, weights).flatten().double() * (count // 2)) > ERROR_RATE


def test_the_law_test_sees_a_wrong_law():
    counts = torch.tensor([5_300, 4_700])
    assert chi_square_p(counts, torch.tensor([5_000, 5_000])) < ERROR_RATE
    assert chi_square_p(torch.tensor([5_050, 4_950]), torch.tensor([5_000, 5_000])) > 0.1
    with pytest.raises(AssertionError, match="probability 0"):
        chi_square_p(torch.tensor([1, 99]), torch.tensor([0, 100]))
