"""The head of a ranking instead of a full sort: the same tokens, ties included, and how often the sort is needed."""

import math

import pytest
import torch
from asserts import assert_same
from hypothesis import given, settings
from hypothesis import strategies as st

from refimpl.sampling.filters import GROWTH, HEAD, top_k_top_p_by_head, top_k_top_p_filter
from refimpl.sampling.ranking import rank_all, rank_head, top

INF = math.inf


def random_rows(count, V, seed, step, dtype=torch.float32, holes=0.0):
    """Normal logits in steps of ``step`` (so that many tie), some of them -inf, one of each row finite."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(count, V, generator=generator, dtype=torch.float64) * 3
    rows = (rows / step).round() * step if step else rows
    rows[torch.rand(count, V, generator=generator) < holes] = -INF
    rows[:, seed % V] = 1.0
    return rows.to(dtype)


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
        got, num_sorted = top_k_top_p_by_head(logits, top_k, top_p, largest, head)
        assert_same(got, expected)
        assert 0 <= num_sorted <= count


@pytest.mark.parametrize("step", [0, 0.03125])
@pytest.mark.parametrize(("top_k", "top_p"), [(50, 1.0), (0, 0.9), (256, 0.99), (1000, 1.0), (20, 0.5)])
def test_a_real_vocabulary(top_k, top_p, step):
    logits = random_rows(6, 50_000, seed=3, step=step)
    k, p = torch.full((6,), top_k), torch.full((6,), top_p)
    got, _ = top_k_top_p_by_head(logits, k, p, top_k)
    assert_same(got, top_k_top_p_filter(logits, k, p))


def test_rows_that_need_the_sort_are_counted():
    V = 4 * HEAD
    flat, sharp = torch.linspace(0, 1, V), torch.cat((torch.tensor([50.0]), torch.linspace(0, 1, V - 1)))
    rows, p = torch.stack((flat, sharp, flat, sharp)), torch.tensor([0.9, 0.9, 1.0, 1.0])
    filtered, num_sorted = top_k_top_p_by_head(rows, torch.zeros(4, dtype=torch.int64), p, 0)
    assert num_sorted == 1, "only the flat row with top_p reaches beyond the head; a row without filters never does"
    assert (filtered > -INF).sum(-1).tolist() == [(filtered[0] > -INF).sum().item(), 1, V, V]
    tied = torch.zeros(1, V)
    filtered, num_sorted = top_k_top_p_by_head(tied, torch.tensor([5]), torch.ones(1), 5)
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


def test_the_settled_part_of_a_head_is_certain():
    rows = random_rows(20, 300, seed=1, step=0.5)
    head, whole = rank_head(rows, 40), rank_all(rows)
    assert_same(head.values, whole.values[:, :40])
    for row, settled in enumerate(head.settled.tolist()):
        assert 0 < settled < 40
        assert head.ids[row, :settled].tolist() == whole.ids[row, :settled].tolist()


def test_a_longer_head_is_tried_before_all_is_sorted():
    V = 4 * GROWTH * HEAD
    rows = torch.zeros(1, V)
    rows[0, : 2 * HEAD] = torch.linspace(19, 18, 2 * HEAD)  # much of their mass lies beyond the first head
    filtered, num_sorted = top_k_top_p_by_head(rows, torch.zeros(1, dtype=torch.int64), torch.tensor([0.9]), 0)
    assert num_sorted == 0
    assert HEAD < (filtered > -INF).sum() < 2 * HEAD
    assert_same(filtered, top_k_top_p_filter(rows, torch.zeros(1, dtype=torch.int64), torch.tensor([0.9])))
