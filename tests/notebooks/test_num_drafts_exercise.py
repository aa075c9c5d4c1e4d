"""The check of notebook 06's exercise A: what is right passes, and choices that forget something are found out."""

from functools import partial

import pytest

from refimpl.exercises import ExerciseError, check_num_drafts
from refimpl.speculative.law import LADDER, best_num_drafts, speedup


def test_the_formula_is_right():
    assert check_num_drafts(best_num_drafts).startswith("right, in 300 cases")


def chosen_by(speed, rates, c, v):
    return max(LADDER, key=lambda K: speed(rates, K, c, v))


WRONG = {
    "a fixed number": lambda rates, c, v: 3,
    "a check that costs nothing more": partial(chosen_by, lambda rates, K, c, v: speedup(rates, K, c)),
    "drafts that cost nothing": partial(chosen_by, lambda rates, K, c, v: speedup(rates, K, 0.0, v)),
    "one rate for all places": partial(chosen_by, lambda rates, K, c, v: speedup(rates[0], K, c, v)),
    "rates that are not multiplied": partial(
        chosen_by, lambda rates, K, c, v: (1 + sum(rates[:K])) / (K * c + v(K + 1) if K else 1)
    ),
    "v of K, not of K + 1": partial(chosen_by, lambda rates, K, c, v: speedup(rates, K, c, lambda n: v(n - 1))),
    "never none": lambda rates, c, v: best_num_drafts(rates, c, v, LADDER[1:]),
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_fault_is_found_out(fault):
    with pytest.raises(ExerciseError, match="times as fast as no drafts, and K = "):
        check_num_drafts(WRONG[fault])


def test_what_is_no_rung_is_refused():
    with pytest.raises(ExerciseError, match="gave 4, which is none of"):
        check_num_drafts(lambda rates, c, v: 4)
