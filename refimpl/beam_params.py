"""BeamSearchParams: how a beam search is done. Names are vLLM's, meanings those of transformers' beam search."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from refimpl.field_checks import FieldChecks, NamesItsFields

WIDEST = 256
"""The widest beam: what a step computes for one request."""


class BeamSearchParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, metaclass=NamesItsFields):
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
    stop: tuple[str, ...] = ()
    """Texts that end a hypothesis: it is finished with the token that completes the first of them in its text, and is scored
    with all of its tokens, like one that a stop id ends. The text is cut before the stop string. A single string is one."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end a hypothesis, besides the model's own end-of-sequence ids. The id stays in ``token_ids``; it has no
    text."""
    include_stop_str_in_output: bool = False
    """Keep the stop string, or the text of the id that ended a hypothesis, at the end of the text."""
    ignore_eos: bool = False
    """Go on past the model's end-of-sequence ids."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""

    def __post_init__(self) -> None:
        check = FieldChecks(self)
        check.whole("beam_width", 1, WIDEST)
        check.whole("max_tokens", 1, math.inf, "a whole number, 1 or more")
        check.number("length_penalty", -100, 100)
        check.that(
            "early_stopping", lambda value: value is True or value is False or value == "never", "True, False or 'never'"
        )
        check.texts("stop", "a text or a list of texts, none of them empty", str.__len__)
        check.ids("stop_token_ids")
        check.flags("include_stop_str_in_output", "ignore_eos", "skip_special_tokens")
