"""BeamSearchParams: how a beam search is done. Names are vLLM's, meanings those of transformers' beam search."""

from __future__ import annotations

from numbers import Integral, Real
from typing import Any, Literal

import msgspec

from refimpl.errors import SamplingParamsError

WIDEST = 256
"""The widest beam: what a step computes for one request."""


class BeamSearchParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to search for the most probable outputs of one prompt; checked when made.

    Raises:
        SamplingParamsError: a value is out of its range.

    """

    beam_width: int
    """Hypotheses that are followed, and returned, best first."""
    max_tokens: int = 16
    """The most tokens of a hypothesis."""
    length_penalty: float = 1.0
    """A hypothesis of n tokens scores its log-probability over n to this power: above 0 favours long ones."""
    early_stopping: bool | Literal["never"] = False
    """When to stop with ``beam_width`` finished hypotheses: True, at once; False, when none that runs would score higher if
    it ended now; "never", when none could even at its longest."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end a hypothesis, besides the model's own end-of-sequence ids."""
    ignore_eos: bool = False
    """Go on past the model's end-of-sequence ids."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""

    def __post_init__(self) -> None:
        def check(ok: bool, name: str, allowed: str) -> None:
            if not ok:
                raise SamplingParamsError(f"{name} is {getattr(self, name)!r}; it must be {allowed}")

        def is_int(value: Any, least: int) -> bool:
            return not isinstance(value, bool) and isinstance(value, Integral) and int(value) >= least

        def is_number(value: Any, most: float) -> bool:
            return not isinstance(value, bool) and isinstance(value, Real) and abs(float(value)) <= most

        width = self.beam_width
        check(is_int(width, 1) and width <= WIDEST, "beam_width", f"a whole number from 1 to {WIDEST}")
        check(is_int(self.max_tokens, 1), "max_tokens", "a whole number, 1 or more")
        check(is_number(self.length_penalty, 100), "length_penalty", "a number from -100 to 100")
        check(self.early_stopping in (True, False, "never"), "early_stopping", "True, False or 'never'")
        ids = self.stop_token_ids
        check(isinstance(ids, tuple | list) and all(is_int(i, 0) for i in ids), "stop_token_ids", "a list of token ids")
        for name in ("ignore_eos", "skip_special_tokens"):
            check(isinstance(getattr(self, name), bool), name, "True or False")
        msgspec.structs.force_setattr(self, "stop_token_ids", tuple(map(int, ids)))
