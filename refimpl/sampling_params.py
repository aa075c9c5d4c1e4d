"""SamplingParams: how the tokens of one request are drawn. Names and meanings are vLLM's."""

from __future__ import annotations

from numbers import Integral, Real
from typing import Any, Literal

import msgspec

from refimpl.errors import SamplingParamsError

OutputKind = Literal["cumulative", "delta", "final_only"]

GREEDY_BELOW = 1e-5
"""Temperatures under this are greedy: the softmax of any logits that differ is one-hot there."""

HOTTEST = 1e30
"""Far beyond where every token is equally probable, and still a float32."""

_INT64 = 2**63


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to draw the tokens of one request; checked when made.

    The order is: logits in float32 → divided by ``temperature`` → ``min_p`` → ``top_k`` → ``top_p`` → one uniform
    number by inverse CDF (:mod:`refimpl.sampling.sampler`). Each filter keeps at least the most probable token.

    Raises:
        SamplingParamsError: a value is out of its range.

    """

    n: int = 1
    """Independent samples of the same prompt (at least 1)."""
    temperature: float = 1.0
    """0 is greedy (the argmax; the lowest id where several tie); 1 is the model's own distribution."""
    top_p: float = 1.0
    """Keep the smallest set of most probable tokens whose mass reaches this, from 0 (the first one alone) to 1 (all)."""
    top_k: int = 0
    """Keep this many of the most probable tokens; 0 and -1 keep all, as does a number beyond the vocabulary."""
    min_p: float = 0.0
    """Drop tokens whose probability is under this share of the most probable one's, from 0 (none) to 1."""
    seed: int | None = None
    """Two requests with the same prompt, parameters and seed draw the same tokens, alone or in any batch.
    None takes the engine's seed mixed with the request's arrival number."""
    max_tokens: int | None = 16
    """The most tokens to generate; None goes on to ``max_model_len``."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end a sample, besides the model's own end-of-sequence ids. The id stays in ``token_ids``."""
    ignore_eos: bool = False
    """Go on past the model's end-of-sequence ids (for benchmarks)."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text (never out of ``token_ids``)."""
    output_kind: OutputKind = "cumulative"
    """What ``Engine.step`` returns for a running request: all so far, only what is new, or nothing until its end."""

    def __post_init__(self) -> None:
        def check(ok: bool, name: str, allowed: str) -> None:
            if not ok:
                raise SamplingParamsError(f"{name} is {getattr(self, name)!r}; it must be {allowed}")

        def is_int(value: object) -> bool:
            return isinstance(value, Integral) and not isinstance(value, bool)  # numpy's too

        def is_number(value: object) -> bool:
            return isinstance(value, Real) and not isinstance(value, bool)

        check(is_int(self.n) and 1 <= self.n <= 1024, "n", "a whole number from 1 to 1024")
        hot_enough = is_number(self.temperature) and 0 <= self.temperature <= HOTTEST
        check(hot_enough, "temperature", f"a finite number, 0 (greedy) or more (at most {HOTTEST:g})")
        check(is_number(self.top_p) and 0 <= self.top_p <= 1, "top_p", "a number from 0 (greedy) to 1 (off)")
        check(is_int(self.top_k) and -1 <= self.top_k < _INT64, "top_k", "a whole number: 0 or -1 (off), or 1 and more")
        check(is_number(self.min_p) and 0 <= self.min_p <= 1, "min_p", "a number from 0 (off) to 1")
        check(
            self.seed is None or (is_int(self.seed) and -_INT64 <= self.seed < _INT64),
            "seed",
            "None or a whole number of 64 bits",
        )
        check(
            self.max_tokens is None or (is_int(self.max_tokens) and self.max_tokens >= 1),
            "max_tokens",
            "None (up to max_model_len) or a whole number, 1 or more",
        )
        check(self.output_kind in ("cumulative", "delta", "final_only"), "output_kind", "cumulative, delta or final_only")
        check(
            isinstance(self.stop_token_ids, tuple | list) and all(is_int(t) and t >= 0 for t in self.stop_token_ids),
            "stop_token_ids",
            "a list of token ids, each 0 or more",
        )
        plain: dict[str, Any] = {"stop_token_ids": tuple(map(int, self.stop_token_ids))}
        plain |= {name: float(getattr(self, name)) for name in ("temperature", "top_p", "min_p")}
        plain |= {name: int(getattr(self, name)) for name in ("n", "top_k")}
        plain |= {name: int(getattr(self, name)) for name in ("seed", "max_tokens") if getattr(self, name) is not None}
        for name, value in plain.items():
            msgspec.structs.force_setattr(self, name, value)

    @property
    def greedy(self) -> bool:
        """Whether no random number is drawn."""
        return self.temperature < GREEDY_BELOW
