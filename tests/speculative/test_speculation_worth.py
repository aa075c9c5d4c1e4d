"""The closed forms of speculation against simulated rounds, and the choice of K against all others.

Means of 20,000 rounds are held to 5 standard errors: a right formula is refused once in 1.7 million cases, by seed.
"""

import math

import pytest
import torch
from verify_support import by_library

from refimpl.errors import ConfigError
from refimpl.exercises.rounds import Laws, length_law, num_texts, play
from refimpl.speculative.law import (
    LADDER,
    acceptance,
    best_num_drafts,
    lengths_of_rounds,
    most_draft_cost,
    speedup,
    tokens_a_round,
    total_variation,
)

P, Q = torch.tensor([0.5, 0.3, 0.2, 0.0]), torch.tensor([0.25, 0.25, 0.25, 0.25])
ALPHA = 0.7


def test_acceptance_is_the_overlap_and_one_minus_the_distance():
    assert acceptance(P, Q).item() == pytest.approx(ALPHA)
    random = torch.Generator().manual_seed(0)
    p, q = torch.randn(2, 5, 40, 30, generator=random).mul(2).softmax(-1)
    assert torch.allclose(acceptance(p, q), 1 - total_variation(p, q), atol=1e-12)
    assert torch.allclose(acceptance(3 * p, 0.5 * q), acceptance(p, q), atol=1e-6)
    assert (acceptance(p, p) - 1).abs().max() < 1e-12
    assert acceptance(torch.eye(3), torch.eye(3).roll(1, 0)).tolist() == [0, 0, 0]


@pytest.mark.parametrize("K", [0, 1, 3, 5])
def test_tokens_a_round_are_those_of_played_rounds(K):
    """p and q that are the same after every text, so that α is one number."""
    laws = Laws(P.expand(num_texts(4, K + 2), 4), Q.expand(num_texts(4, K + 2), 4))
    lengths = play(laws, by_library, K, L=1).first_lengths.double()
    mean = (lengths * torch.arange(K + 2)).sum() / lengths.sum()
    law = torch.tensor([0.0, *lengths_of_rounds(ALPHA, K)], dtype=torch.float64)
    assert torch.allclose(law, length_law(laws, K), atol=1e-7)
    spread = math.sqrt(sum(w * n**2 for n, w in enumerate(law.tolist())) - tokens_a_round(ALPHA, K) ** 2)
    assert abs(mean.item() - tokens_a_round(ALPHA, K)) <= 5 * spread / math.sqrt(lengths.sum().item())


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.9, 0.999, 1.0])
@pytest.mark.parametrize("K", LADDER)
def test_the_sum_is_the_closed_form(alpha, K):
    closed = K + 1 if alpha == 1 else (1 - alpha ** (K + 1)) / (1 - alpha)
    assert tokens_a_round(alpha, K) == pytest.approx(closed, rel=1e-9)
    assert tokens_a_round([alpha] * 8, K) == tokens_a_round(alpha, K)
    lengths = lengths_of_rounds(alpha, K)
    assert sum(lengths) == pytest.approx(1)
    assert sum((n + 1) * share for n, share in enumerate(lengths)) == pytest.approx(closed)


def test_acceptance_by_position_multiplies():
    assert tokens_a_round([0.8, 0.5, 0.25], 3) == pytest.approx(1 + 0.8 + 0.4 + 0.1)
    assert lengths_of_rounds([0.8, 0.5], 2) == pytest.approx([0.2, 0.4, 0.4])
    assert tokens_a_round([0.8, 0.0, 1.0], 3) == 1.8


@pytest.mark.parametrize("c", [0.0, 0.05, 0.22, 0.9])
@pytest.mark.parametrize("alpha", [0.0, 0.4, 0.75, 0.95, 1.0, [0.9, 0.6, 0.3, 0.3, 0.3], []], ids=str)
@pytest.mark.parametrize("v", [1.0, lambda tokens: 0.9 + 0.1 * tokens], ids=["free", "linear"])
def test_the_best_k_is_as_fast_as_any_and_the_least_of_those(alpha, c, v):
    reach = 8 if isinstance(alpha, float) else len(alpha)
    worth = {K: speedup(alpha, K, c, v) for K in LADDER if reach >= K}
    best = best_num_drafts(alpha, c, v)
    assert best == min(K for K in worth if worth[K] == max(worth.values()))
    assert worth[best] >= 1


def test_where_nothing_is_accepted_or_drafts_cost_as_much_nothing_is_drafted():
    assert best_num_drafts(0.0, 0.01) == 0
    assert best_num_drafts(0.9, 1.0) == 0
    assert best_num_drafts(0.5, 0.1, ladder=(2, 5)) == 2
    assert speedup(0.3, 0, c=5.0, v=9.0) == 1.0


def test_what_a_draft_may_cost():
    for K in (1, 3, 5):
        c = most_draft_cost(0.75, K, goal=1.2, v=1.1)
        assert speedup(0.75, K, c, 1.1) == pytest.approx(1.2)
    assert most_draft_cost(0.75, 1, goal=2.3) < 0


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: tokens_a_round(1.2, 2), r"acceptance 1\.2 is no probability"),
        (lambda: tokens_a_round([0.5, math.nan], 2), "acceptance nan is no probability"),
        (lambda: tokens_a_round(0.5, -1), "K = -1 is a number of drafts; it must be 0 or more"),
        (lambda: lengths_of_rounds([0.5], 2), "told for 1 positions; K = 2 drafts need as many"),
        (lambda: speedup(0.5, 1, c=-0.1), "it must be 0 or more"),
    ],
)
def test_wrong_arguments_are_refused(call, text):
    with pytest.raises(ConfigError, match=text):
        call()
