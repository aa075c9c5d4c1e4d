"""SpeculativeConfig: how tokens are drafted, in vLLM's form: ``speculative_config={"method": "ngram", …}``."""

from __future__ import annotations

import dataclasses
import difflib
import json
from dataclasses import dataclass
from typing import Any

from refimpl.errors import ConfigError, UnknownOptionError

METHODS = ("ngram", "draft_model", "head")
SAMPLERS = ("rejection", "coupled")
MOST_DRAFTS = 15
"""A check of so many drafts and one token more is the largest that the decode kernel takes in one row."""


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """The options of speculative decoding.

    Raises:
        ConfigError: a value is out of range, or two contradict each other.

    """

    method: Any = None
    """ngram, draft_model, head, or in Python a :class:`refimpl.speculative.proposer.Proposer`. By default that which fits
    ``model``: with none, or "[ngram]", it is ngram."""
    model: Any = None
    """The draft model, named like the engine's; or the folder of a trained head, by default the one that is shipped."""
    num_speculative_tokens: int = 5
    """Drafts a round; the most, where the number adapts."""
    adaptive: bool = True
    """Draft as many tokens as pay best, or none, by what was accepted and by costs that are measured at the start."""
    sampler: str = "rejection"
    """rejection: the model's law, with most drafts accepted. coupled: token by token what comes without speculation."""
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 5
    """Tokens that an n-gram has in common with the end of the text."""
    synthetic_acceptance: float | None = None
    """For measurements with random weights alone: accept each draft with this probability, whatever the models say. What
    comes out means nothing then."""

    def __post_init__(self) -> None:
        if self.method is None:
            object.__setattr__(self, "method", "ngram" if self.model in (None, "[ngram]") else "draft_model")
        if isinstance(self.method, str) and self.method not in METHODS:
            raise ConfigError(f"speculative_config: method is {self.method!r}; it must be one of {', '.join(METHODS)}")
        if not isinstance(self.method, str) and not callable(getattr(self.method, "propose", None)):
            raise ConfigError(
                f"speculative_config: method is {self.method!r}; it must be one of {', '.join(METHODS)}, or an object with "
                "propose(rows), as refimpl.speculative.proposer.Proposer"
            )
        if self.method == "draft_model" and self.model is None:
            raise ConfigError("speculative_config: method 'draft_model' needs model, the draft model's name or folder")
        if self.method == "ngram" and self.model not in (None, "[ngram]"):
            raise ConfigError(
                f"speculative_config: method 'ngram' reads no model, and model is {self.model!r}; leave out model, or use "
                "method 'draft_model'"
            )
        for name, least, most in (
            ("num_speculative_tokens", 1, MOST_DRAFTS),
            ("prompt_lookup_min", 1, 1000),
            ("prompt_lookup_max", 1, 1000),
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
                raise ConfigError(f"speculative_config: {name} is {value!r}; it must be a whole number, {least} to {most}")
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ConfigError(
                f"speculative_config: prompt_lookup_min is {self.prompt_lookup_min}, over prompt_lookup_max = "
                f"{self.prompt_lookup_max}; lower the first or raise the second"
            )
        if not isinstance(self.adaptive, bool):
            raise ConfigError(f"speculative_config: adaptive is {self.adaptive!r}; it must be True or False")
        if self.sampler not in SAMPLERS:
            raise ConfigError(f"speculative_config: sampler is {self.sampler!r}; it must be one of {', '.join(SAMPLERS)}")
        rate = self.synthetic_acceptance
        if rate is not None and (not isinstance(rate, int | float) or isinstance(rate, bool) or not 0 <= rate <= 1):
            raise ConfigError(f"speculative_config: synthetic_acceptance is {rate!r}; it must be a number from 0 to 1")

    @classmethod
    def of(cls, given: Any) -> SpeculativeConfig | None:
        """From what a user gives: None, a dict, its JSON text, or one of these.

        Raises:
            ConfigError: it is none of them.
            UnknownOptionError: a name is no option; the nearest are named.

        """
        if given is None or isinstance(given, cls):
            return given
        if isinstance(given, str):
            try:
                given = json.loads(given)
            except json.JSONDecodeError as error:
                raise ConfigError(f"speculative_config is no JSON ({error}): {given!r}") from None
        if not isinstance(given, dict):
            raise ConfigError(
                f"speculative_config is {given!r}; it must be a dict, as {{'method': 'ngram', 'num_speculative_tokens': 4}}"
            )
        known = [field.name for field in dataclasses.fields(cls)]
        for name in given:
            if name not in known:
                near = difflib.get_close_matches(str(name), known, n=2)
                hint = f"did you mean {' or '.join(near)}?" if near else f"the options are {', '.join(known)}"
                raise UnknownOptionError(f"unknown option {name!r} of speculative_config; {hint}")
        return cls(**given)
