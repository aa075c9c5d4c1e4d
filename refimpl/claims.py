"""The figures that the notebooks claim: a cell that begins with ``# claim: ID`` holds its value against what is kept here.

``notebooks/claims.toml`` keeps for each claim a relation, a bound, its unit, and the sentence that derives the bound.
"""

from __future__ import annotations

import os
from functools import cache
from importlib.resources import files
from typing import Literal

import msgspec

from refimpl.errors import RefimplError

SHARED_MACHINE = "REFIMPL_SHARED_MACHINE"
"""Environment variable: set where several tests run at once."""


class ClaimError(RefimplError, AssertionError):
    """A measured or computed value does not keep its bound, or nothing is kept under that name."""


class Claim(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One kept claim."""

    relation: Literal["==", "<=", ">=", "within"]
    bound: float | tuple[float, float]
    """A number; for "within" the lowest and the highest."""
    unit: str
    because: str
    """The sentence that derives the bound."""
    timed: bool = False
    """Whether the value comes of a clock: it says nothing while others take the processor's time."""

    def __post_init__(self) -> None:
        if (self.relation == "within") != isinstance(self.bound, tuple):
            raise ValueError(f"bound is {self.bound}; it must be two numbers for 'within', and one for any other relation")

    def holds(self, value: float) -> bool:
        """Whether a value keeps the bound. NaN keeps none."""
        if isinstance(self.bound, tuple):
            return self.bound[0] <= value <= self.bound[1]
        return {"==": value == self.bound, "<=": value <= self.bound, ">=": value >= self.bound}[self.relation]

    @property
    def demand(self) -> str:
        """The relation and the bound in words."""
        if isinstance(self.bound, tuple):
            return f"from {number(self.bound[0])} to {number(self.bound[1])}"
        words = {"==": "", "<=": "at most ", ">=": "at least "}
        return f"{words[self.relation]}{number(self.bound)}"


def check_claim(claim_id: str, value: float) -> str:
    """Hold a value against the bound that is kept under a name; returns a sentence to print.

    Args:
        claim_id: the name in ``notebooks/claims.toml``.
        value: in the claim's own unit.

    Raises:
        ClaimError: the value does not keep the bound, or there is no such claim. A value of a clock is not held to its bound
            where ``REFIMPL_SHARED_MACHINE`` is set.

    """
    claim = all_claims().get(claim_id)
    if claim is None:
        raise ClaimError(f"no claim is named {claim_id!r}; notebooks/claims.toml keeps {', '.join(all_claims())}")
    if claim.timed and not claim.holds(value) and os.environ.get(SHARED_MACHINE):
        return f"{claim_id} is not held where tests share the machine: {number(value)} {claim.unit}"
    if not claim.holds(value):
        raise ClaimError(
            f"{claim_id} does not hold: {number(value)} {claim.unit}, where {claim.demand} was claimed. {claim.because}",
            value=value,
        )
    return f"{claim_id} holds: {number(value)} {claim.unit} (claimed: {claim.demand}). {claim.because}"


@cache
def all_claims() -> dict[str, Claim]:
    """Every claim that is kept, by name."""
    text = files("refimpl").joinpath("notebooks/claims.toml").read_bytes()
    return msgspec.toml.decode(text, type=dict[str, Claim])


def number(value: float) -> str:
    """A number as people read it: whole ones in full, others with four figures or two decimals."""
    if value == value // 1 and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.2f}" if abs(value) >= 100 else f"{value:.4g}"
