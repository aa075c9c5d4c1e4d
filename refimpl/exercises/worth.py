"""An exercise of notebook 06: how many tokens to draft, by what is accepted and by what a round costs."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from refimpl.exercises.wrong import ExerciseError
from refimpl.speculative.law import LADDER, best_num_drafts, speedup

NumDraftsFunction = Callable[[Sequence[float], float, Callable[[int], float]], int]
CASES = 300


def check_num_drafts(num_drafts: NumDraftsFunction) -> str:
    """Hold a choice of K against the formula, over machines and drafts that are drawn at random.

    Args:
        num_drafts: ``num_drafts(rates, c, v) → K``, one of ``LADDER``. ``rates[i]`` is how often the draft at place i is
            accepted, given that those before it were; c is a draft's time over a plain step's, and ``v(n)`` that of a check
            of n tokens.

    Raises:
        ExerciseError: it chose a K that is slower than another; the text says for what.

    """
    rng, chosen = random.Random(0), set[int]()  # noqa: S311, cases of a check
    for _ in range(CASES):
        first, falls = rng.uniform(0.05, 0.99), rng.choice((1.0, 0.9, 0.6))
        rates, c, dear = (
            [first * falls**place for place in range(LADDER[-1])],
            rng.choice((0.0, 0.02, 0.1, 0.3)),
            rng.random(),
        )
        v = _cost_of_checks(dear**3)
        _check_one(num_drafts, rates, c, v)
        chosen.add(best_num_drafts(rates, c, v))
    assert chosen == set(LADDER), "each number is the best in one case or another"
    return f"right, in {CASES} cases, 0 drafts among them"


def _cost_of_checks(slope: float) -> Callable[[int], float]:
    return lambda n: 1 + slope * (n - 1)


def _check_one(num_drafts: NumDraftsFunction, rates: list[float], c: float, v: Callable[[int], float]) -> None:
    found, best = num_drafts(list(rates), c, v), best_num_drafts(rates, c, v)
    if found not in LADDER:
        raise ExerciseError(f"num_drafts gave {found!r}, which is none of {LADDER}")
    here, there = speedup(rates, found, c, v), speedup(rates, best, c, v)
    if here < there * (1 - 1e-9):
        told = ", ".join(f"{rate:.2f}" for rate in rates)
        raise ExerciseError(
            f"with acceptance {told}, c = {c} and v(2) = {v(2):.2f}, K = {found} is {here:.3f} times as fast as no drafts, "
            f"and K = {best} {there:.3f} times"
        )
