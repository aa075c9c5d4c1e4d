"""The head of a ranking instead of a full sort: the same tokens, ties included, and how often the sort is needed."""

import math

import pytest
import torch
from asserts import assert_same
from hypothesis import given, settings
from hypothesis import strategies as st

from refimpl.sampling.filters import GROWTH, HEAD, kept_by_head, top_k_top_p_filter
from refimpl.sampling.ranking import BLOCK, argmax, rank_all, rank_head, top

INF = math.inf


def random_rows(count, V, seed, step, dtype=torch.float32, holes=0.0):
    """Normal logits in steps of ``step`` (so that many tie), some of them -inf, one of each row finite."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(count, V, generator=generator, dtype=torch.float64) * 3
    rows = (rows / step).round() * step if step else rows
    rows[torch.rand(count, V, generator=generator) < holes] = -INF
    rows[:, seed % V] = 1.0
    return rows.to(dtype)


def by_head(logits, *arguments):
    """What is kept, laid out over the vocabulary; and how many rows were sorted. Each row is told of once, ids in order."""
    filtered, num_sorted, told, weights = torch.full_like(logits, -INF), 0, [], logits.softmax(-1)
    assert (weights[logits > -INF] > 0).all(), "0 tells what is dropped"
    for kept in kept_by_head(logits, weights, *arguments):
        assert (kept.ids.diff() > 0).all()
        own = torch.zeros_like(weights[kept.rows]).scatter(-1, kept.ids, kept.weights)
        assert_same(own, torch.where(own > 0, weights[kept.rows], 0))
        filtered[kept.rows] = torch.where(own > 0, logits[kept.rows], -INF)
        num_sorted += len(kept.rows) * kept.was_sorted
        told += kept.rows.tolist()
    assert sorted(told) == list(range(len(logits)))
    return filtered, num_sorted


cases = st.fixed_dictionaries(
    {
        "count": st.integers(1, 5),
        "V": st.integers(1, 400),
        "seed": st.integers(0, 10**6),
        "step": st.sampled_from([0, 0.01, 0.5, 4.0]),
        "dtype": st.sampled_from([torch.float32, torch.float64]),
        "holes": st.sampled_from([0.0, 0.5, 0.99]),
    }
)


@settings(max_examples=200, deadline=None)
@given(case=cases, data=st.data())
def test_top_k_and_top_p_by_the_head_are_those_of_the_full_sort(case, data):
    logits = random_rows(**case)
    count, V = logits.shape
    top_k = torch.tensor(
        data.draw(st.lists(st.sampled_from([0, -1, 1, 2, 7, 40, V, V + 1]), min_size=count, max_size=count))
    )
    top_p = torch.tensor(
        data.draw(st.lists(st.sampled_from([0.0, 1e-9, 0.1, 0.5, 0.9, 0.999, 1.0]), min_size=count, max_size=count))
    )
    largest = max([k for k in top_k.tolist() if 0 < k < V], default=0)
    expected = top_k_top_p_filter(logits, top_k, top_p)
    for head in (1, 8, 32):  # short heads, so that all ways are gone in a small vocabulary
        got, num_sorted = by_head(logits, top_k, top_p, largest, head)
        assert_same(got, expected)
        assert 0 <= num_sorted <= count


@pytest.mark.parametrize("step", [0, 0.03125])
@pytest.mark.parametrize(("top_k", "top_p"), [(50, 1.0), (0, 0.9), (256, 0.99), (1000, 1.0), (20, 0.5)])
def test_a_real_vocabulary(top_k, top_p, step):
    logits = random_rows(6, 50_000, seed=3, step=step)
    k, p = torch.full((6,), top_k), torch.full((6,), top_p)
    got, _ = by_head(logits, k, p, top_k)
    assert_same(got, top_k_top_p_filter(logits, k, p))


def test_rows_that_need_the_sort_are_counted():
    V = 4 * HEAD
    flat, sharp = torch.linspace(0, 1, V), torch.cat((torch.tensor([50.0]), torch.linspace(0, 1, V - 1)))
    rows, p = torch.stack((sharp, flat, sharp)), torch.full((3,), 0.9)
    filtered, num_sorted = by_head(rows, torch.zeros(3, dtype=torch.int64), p, 0)
    assert num_sorted == 1, "only the flat row reaches beyond the head"
    assert (filtered > -INF).sum(-1).tolist() == [1, (filtered[1] > -INF).sum().item(), 1]
    tied = torch.zeros(1, V)
    filtered, num_sorted = by_head(tied, torch.tensor([5]), torch.ones(1), 5)
    assert num_sorted == 1, "all tie with the head's last"
    assert (filtered[0] > -INF).nonzero().flatten().tolist() == [0, 1, 2, 3, 4]


@settings(max_examples=100, deadline=None)
@given(case=cases, k=st.integers(1, 60))
def test_the_top_of_a_row_is_that_of_a_stable_sort(case, k):
    rows = random_rows(**case)
    values, ids = top(rows, k)
    whole = rank_all(rows)
    assert_same(values.nan_to_num(neginf=-1e9), whole.values[:, :k].nan_to_num(neginf=-1e9))
    assert ids.tolist() == whole.ids[:, :k].tolist()


@settings(max_examples=100, deadline=None)
@given(case=cases)
def test_the_argmax_is_the_lowest_id_of_the_largest_value(case):
    rows = random_rows(**case)
    assert argmax(rows).tolist() == rank_all(rows).ids[:, 0].tolist() == rows.argmax(-1).tolist()


def test_the_argmax_of_a_row_at_the_ends_of_blocks():
    for V in (BLOCK, 3 * BLOCK, 3 * BLOCK + 1):
        rows = torch.full((V, V), -INF).fill_diagonal_(0.0)
        assert argmax(rows).tolist() == list(range(V))


@pytest.mark.parametrize(("V", "count"), [(300, 40), (300, 4), (5000, 1), (4999, 40), (4999, 77)])
@pytest.mark.parametrize("step", [0, 0.5])
def test_the_settled_part_of_a_head_is_certain(V, count, step):
    rows = random_rows(20, V, seed=1, step=step)
    head, whole = rank_head(rows, count), rank_all(rows)
    assert_same(head.values, whole.values[:, :count])
    for row, settled in enumerate(head.settled.tolist()):
        assert settled == (whole.values[row, :count] > whole.values[row, count - 1]).sum()
        assert head.ids[row, :settled].tolist() == whole.ids[row, :settled].tolist()


def test_a_longer_head_is_tried_before_all_is_sorted():
    V = 4 * GROWTH * HEAD
    rows = torch.zeros(1, V)
    rows[0, : 2 * HEAD] = torch.linspace(19, 18, 2 * HEAD)  # much of their mass lies beyond the first head
    filtered, num_sorted = by_head(rows, torch.zeros(1, dtype=torch.int64), torch.tensor([0.9]), 0)
    assert num_sorted == 0
    assert HEAD < (filtered > -INF).sum() < 2 * HEAD
    assert_same(filtered, top_k_top_p_filter(rows, torch.zeros(1, dtype=torch.int64), torch.tensor([0.9])))
