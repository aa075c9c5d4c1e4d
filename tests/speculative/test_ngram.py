"""Prompt lookup against a loop that compares everything with everything."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refimpl.errors import ConfigError
from refimpl.speculative import ngram
from refimpl.speculative.ngram import propose


def by_loops(tokens, k, min_n, max_n):
    """The definition, word by word."""
    for n in range(max_n, min_n - 1, -1):
        for end in range(len(tokens) - 1, n - 1, -1):  # end of the match, exclusive; the most recent first
            if tokens[end - n : end] == tokens[-n:]:
                text = list(tokens)
                for i in range(k):
                    text.append(text[end + i])
                return text[len(tokens) :]
    return []


lengths = st.integers(1, 4).flatmap(lambda low: st.tuples(st.just(low), st.integers(low, 5)))


@pytest.mark.parametrize("recent", [1, 5, ngram.RECENT])
@settings(deadline=None)
@given(st.lists(st.integers(0, 3), max_size=40), st.integers(0, 8), lengths, st.sampled_from([list, np.int32, np.int64]))
def test_it_is_what_loops_find(recent, tokens, k, n, kind):
    given_as = tokens if kind is list else np.array(tokens, dtype=kind)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ngram, "RECENT", recent)
        assert propose(given_as, k, *n) == by_loops(tokens, k, *n)


def test_the_longest_suffix_wins_over_a_more_recent_shorter_one():
    assert propose([1, 2, 3, 7, 2, 3, 8, 9, 1, 2, 3], 1, 1, 3) == [7]
    assert propose([1, 2, 3, 7, 2, 3, 8, 9, 1, 2, 3], 1, 1, 2) == [8]


def test_the_most_recent_of_equal_matches_wins():
    """A name (5) was replaced by another (6) once: the next occurrence is drafted with the new one."""
    assert propose([1, 2, 5, 3, 1, 2, 6, 3, 1, 2], 2, 2, 2) == [6, 3]


def test_a_match_near_the_end_goes_on_in_its_own_copy():
    assert propose([9, 1, 2, 1, 2], 5, 2, 2) == [1, 2, 1, 2, 1]
    assert propose([4, 4], 3, 1, 3) == [4, 4, 4]


def test_nothing_is_drafted_without_a_match():
    assert propose([1, 2, 3, 4], 3, 1, 3) == []
    assert propose([1, 2, 3, 1], 3, 2, 3) == []
    assert propose([], 3, 1, 3) == []
    assert propose([1], 3, 1, 3) == []
    assert propose([1, 1, 1], 0, 1, 3) == []


def test_the_array_is_only_read():
    tokens = np.array([1, 2, 3, 1, 2])
    tokens.flags.writeable = False
    drafted = propose(tokens, 2, 1, 3)
    assert drafted == [3, 1]
    assert all(type(token) is int for token in drafted)


@pytest.mark.parametrize(("low", "high"), [(0, 2), (3, 2), (-1, -1)])
def test_lengths_that_hold_no_suffix_are_refused(low, high):
    with pytest.raises(ConfigError, match=f"compares {low} to {high} tokens"):
        propose([1, 2, 1], 2, low, high)
