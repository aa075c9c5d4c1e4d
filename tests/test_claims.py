"""A claim's value is held against its bound, and the sentence says both."""

import math

import pytest

from refimpl import claims
from refimpl.claims import Claim, ClaimError, all_claims, check_claim, number
from refimpl.errors import RefimplError

KEPT = {
    "least": Claim(">=", 2, "times as many", "Two halves."),
    "most": Claim("<=", 15, "slots", "The block size less one."),
    "exact": Claim("==", 327_680, "bytes", "2 · 80 · 8 · 128 · 2."),
    "between": Claim("within", (0.87, 0.88), "of a reservation", "1 − 500 / 4,096."),
}


@pytest.fixture
def kept(monkeypatch):
    monkeypatch.setattr(claims, "all_claims", lambda: KEPT)


@pytest.mark.parametrize(
    ("claim_id", "good", "bad"),
    [
        ("least", [2, 2.5], [1.99, -math.inf]),
        ("most", [15, 0], [15.1, math.inf]),
        ("exact", [327_680, 327_680.0], [327_681, 327_680.5]),
        ("between", [0.87, 0.878, 0.88], [0.8699, 0.89]),
    ],
)
def test_a_value_that_leaves_its_bound_fails(kept, claim_id, good, bad):
    for value in good:
        assert check_claim(claim_id, value).startswith(f"{claim_id} holds: ")
    for value in [*bad, math.nan]:
        with pytest.raises(ClaimError, match=f"{claim_id} does not hold"):
            check_claim(claim_id, value)


def test_the_sentence_has_the_value_the_bound_the_unit_and_the_derivation(kept):
    assert check_claim("exact", 327_680) == "exact holds: 327,680 bytes (claimed: 327,680). 2 · 80 · 8 · 128 · 2."
    assert check_claim("between", 0.8779) == (
        "between holds: 0.8779 of a reservation (claimed: from 0.87 to 0.88). 1 − 500 / 4,096."
    )
    with pytest.raises(ClaimError, match=r"most does not hold: 16 slots, where at most 15 was claimed\. The block size"):
        check_claim("most", 16)


def test_an_unknown_claim_is_an_error_that_names_the_kept_ones(kept):
    with pytest.raises(ClaimError, match=r"no claim is named 'first'; .* keeps least, most, exact, between"):
        check_claim("first", 1)


def test_a_failed_claim_is_an_assertion_and_an_error_of_ours():
    assert issubclass(ClaimError, AssertionError)
    assert issubclass(ClaimError, RefimplError)


def test_a_bound_that_does_not_fit_its_relation_is_refused():
    for relation, bound in (("within", 1), ("<=", (1, 2))):
        with pytest.raises(ValueError, match="must be two numbers for 'within'"):
            Claim(relation, bound, "x", "y")


def test_every_kept_claim_is_whole():
    for claim_id, claim in all_claims().items():
        assert claim.unit, claim_id
        assert claim.because.endswith("."), claim_id


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (327_680.0, "327,680"), (0.87793, "0.8779"), (687.19477, "687.19"), (-3, "-3"), (math.inf, "inf")],
)
def test_numbers_are_written_for_people(value, text):
    assert number(value) == text


def test_what_a_clock_says_is_told_but_not_held_where_tests_share_the_machine(monkeypatch):
    timed = {name: Claim(claim.relation, claim.bound, claim.unit, claim.because, timed=True) for name, claim in KEPT.items()}
    monkeypatch.setattr(claims, "all_claims", lambda: timed | {"counted": KEPT["most"]})
    monkeypatch.setenv("REFIMPL_SHARED_MACHINE", "1")
    assert check_claim("most", 16) == "most is not held where tests share the machine: 16 slots"
    assert check_claim("most", 15).startswith("most holds: ")
    with pytest.raises(ClaimError, match="counted does not hold"):
        check_claim("counted", 16)
    monkeypatch.delenv("REFIMPL_SHARED_MACHINE")
    with pytest.raises(ClaimError, match="most does not hold"):
        check_claim("most", 16)
