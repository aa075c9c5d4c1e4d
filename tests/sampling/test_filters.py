"""Top-k, top-p and min-p against slow, plain definitions, and what their edge values mean."""

import math

import pytest
import torch
from asserts import assert_same
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from refimpl.sampling.filters import min_p_filter, top_k_top_p_filter

INF = math.inf


def kept(filtered):
    """The ids that a filter left, row by row."""
    return [{i for i, value in enumerate(row) if value > -INF} for row in filtered.tolist()]


def top(logits, k=0, p=1.0):
    rows = torch.tensor(logits, dtype=torch.float32)
    return top_k_top_p_filter(rows, torch.full((len(rows),), k), torch.full((len(rows),), p))


def keep_min_p(logits, min_p):
    rows = torch.tensor(logits, dtype=torch.float32)
    return min_p_filter(rows, torch.full((len(rows),), min_p))


ROW = [1.0, 3.0, 2.0, -1.0, 0.0]  # most probable first: 1, 2, 0, 4, 3
MASSES = torch.tensor(ROW).softmax(0).tolist()


@pytest.mark.parametrize("k", [0, -1, 5, 6, 2**62])
def test_top_k_that_keeps_all(k):
    assert_same(top([ROW], k=k), torch.tensor([ROW]))


def test_top_k_keeps_k():
    assert [kept(top([ROW], k=k))[0] for k in (1, 2, 3, 4)] == [{1}, {1, 2}, {0, 1, 2}, {0, 1, 2, 4}]


@pytest.mark.parametrize("p", [0.0, 1e-9, 1e-45, 0.3])
def test_a_tiny_top_p_keeps_the_most_probable_token(p):
    assert kept(top([ROW], p=p)) == [{1}]


def test_top_p_1_is_off():
    assert_same(top([ROW], p=1.0), torch.tensor([ROW]))
    sharp = [[0.0, -80.0, -100.0]]  # masses that vanish beside 1 in float32
    assert_same(top(sharp, p=1.0), torch.tensor(sharp))


def test_top_p_keeps_the_fewest_that_reach_it():
    first, second = MASSES[1], MASSES[1] + MASSES[2]
    assert kept(top([ROW], p=first - 1e-4)) == [{1}]
    assert kept(top([ROW], p=first + 1e-4)) == [{1, 2}]
    assert kept(top([ROW], p=second - 1e-4)) == [{1, 2}]
    assert kept(top([ROW], p=second + 1e-4)) == [{0, 1, 2}]


def test_top_p_counts_the_mass_that_top_k_left():
    assert kept(top([ROW], k=2, p=MASSES[1] + 0.05)) == [{1}]  # of two tokens, the first has 73% of the mass
    assert kept(top([ROW], k=2, p=0.74)) == [{1, 2}]


def test_the_lower_id_wins_a_tie():
    tied = [[1.0, 2.0, 2.0, 2.0, 0.0]]
    assert kept(top(tied, k=1)) == [{1}]
    assert kept(top(tied, k=2)) == [{1, 2}]
    assert kept(top(tied, p=0.0)) == [{1}]
    assert kept(top([[5.0] * 7], k=3)) == [{0, 1, 2}]
    assert kept(top([[5.0] * 8], p=0.5)) == [{0, 1, 2, 3}]
    assert kept(top([[5.0, 4.0] * 5000], k=6)) == [{0, 2, 4, 6, 8, 10}]


def test_min_p():
    assert_same(keep_min_p([ROW], 0.0), torch.tensor([ROW]))
    assert kept(keep_min_p([ROW], 1.0)) == [{1}]
    assert kept(keep_min_p([[2.0, 1.0, 2.0]], 1.0)) == [{0, 2}]  # equally probable: none is below the other
    assert kept(keep_min_p([ROW], math.exp(-1) - 1e-3)) == [{1, 2}]
    assert kept(keep_min_p([ROW], math.exp(-1) + 1e-3)) == [{1}]
    assert_same(keep_min_p([[0.0, -1e30, -INF]], 0.0), torch.tensor([[0.0, -1e30, -INF]]))


def test_rows_have_their_own_parameters():
    rows = torch.tensor([ROW] * 4)
    got = top_k_top_p_filter(rows, torch.tensor([0, 1, 6, 3]), torch.tensor([1.0, 1.0, 0.0, MASSES[1] + 0.05]))
    assert kept(got) == [{0, 1, 2, 3, 4}, {1}, {1}, {1, 2}]
    assert kept(min_p_filter(rows, torch.tensor([0.0, 1.0, 0.3, 0.1]))) == [{0, 1, 2, 3, 4}, {1}, {1, 2}, {0, 1, 2}]


def test_kept_logits_keep_their_value_and_arguments_are_not_changed():
    rows = torch.tensor([ROW])
    got = top_k_top_p_filter(rows, torch.tensor([3]), torch.tensor([0.99]))
    assert got.tolist() == [[1.0, 3.0, 2.0, -INF, -INF]]
    assert min_p_filter(rows, torch.tensor([0.5])).tolist() == [[-INF, 3.0, -INF, -INF, -INF]]
    assert_same(rows, torch.tensor([ROW]))


def test_dropped_tokens_stay_dropped():
    assert kept(top([[-INF, 1.0, -INF, 0.0]], k=3)) == [{1, 3}]
    assert kept(top([[-INF, 1.0, -INF, 0.0]], p=0.999999)) == [{1, 3}]
    assert kept(keep_min_p([[-INF, 1.0, -INF, 0.0]], 1e-9)) == [{1, 3}]


@pytest.mark.parametrize("filtered", [top([[-INF] * 3], k=1), top([[-INF] * 3], p=0.5), keep_min_p([[-INF] * 3], 0.5)])
def test_a_row_of_nothing_is_no_crash(filtered):
    assert filtered.shape == (1, 3)


def test_one_token():
    assert top([[0.3]], k=1, p=0.0).tolist() == keep_min_p([[0.3]], 1.0).tolist() == torch.tensor([[0.3]]).tolist()


# ---------------------------------------------------------------------- against plain definitions


def plain_min_p(row, min_p):
    largest = max(row)
    return {i for i, value in enumerate(row) if math.exp(value - largest) >= min_p and value > -INF}


def plain_top_k_top_p(row, k, p):
    """The definition: rank by probability (lower id first among equals), cut at k, then the shortest head of mass p."""
    ranked = sorted((i for i in range(len(row)) if row[i] > -INF), key=lambda i: (-row[i], i))
    if k >= 1:
        ranked = ranked[:k]
    weights = [math.exp(row[i] - max(row)) for i in ranked]
    head, mass = [], 0.0
    for i, weight in zip(ranked, weights, strict=True):
        assume(p == 1 or abs(mass - p) > 1e-5)  # on the edge, float32's rounding decides
        if head and p < 1 and mass >= p:
            break
        head.append(i)
        mass += weight / sum(weights)
    return set(head)


values = st.one_of(st.integers(-4, 4).map(float), st.floats(-30, 30, width=32), st.just(-INF))
rows = st.lists(values, min_size=1, max_size=12).filter(lambda row: max(row) > -INF)
shares = st.one_of(st.sampled_from([0.0, 1e-9, 0.1, 0.5, 0.9, 0.999, 1.0]), st.floats(0, 1, width=32))


@settings(max_examples=300, deadline=None)
@given(row=rows, k=st.integers(-1, 14), p=shares)
def test_top_k_top_p_is_its_definition(row, k, p):
    assert kept(top([row], k=k, p=p)) == [plain_top_k_top_p(row, k, p)]


@settings(max_examples=200, deadline=None)
@given(row=rows, min_p=shares)
def test_min_p_is_its_definition(row, min_p):
    largest = max(row)
    assume(all(abs(math.exp(v - largest) - min_p) > 1e-6 * min_p or v == largest for v in row if v > -INF))
    assert kept(keep_min_p([row], min_p)) == [plain_min_p(row, min_p)]
