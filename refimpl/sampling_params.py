"""SamplingParams: how the tokens of one request are drawn. Names and meanings are vLLM's."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal, Protocol, runtime_checkable

import msgspec

from refimpl.errors import SamplingParamsError
from refimpl.field_checks import FieldChecks, NamesItsFields, is_number, is_whole

OutputKind = Literal["cumulative", "delta", "final_only"]

GREEDY_BELOW = 1e-5
"""Temperatures under this are greedy: the softmax of any logits that differ is one-hot there."""

HOTTEST = 1e30
"""Far beyond where every token is equally probable, and still a float32."""

BIAS_LIMIT = 100.0
"""A logit_bias beyond this is taken as this: it decides already."""

_INT64 = 2**63


@runtime_checkable
class LogitsHook(Protocol):
    """A researcher's own change to the logits of a row, before temperature and filters (and after penalties and biases).

    It is called within the step, for one row after the other. One that raises, or returns another shape, another dtype,
    NaN or +inf, ends its request with reason "error" and the rest goes on.
    """

    def __call__(self, token_ids: Any, logits: Any) -> Any:
        """The changed logits ``[V]`` (float32, a new tensor or the given one) for the token after ``token_ids`` ``[L]``."""


LogitsHooks = dict[int, LogitsHook]
"""The hooks of requests by sequence id. A hook is an object, so it never travels in a step's plan: the engine gives this
registry to an executor of the same process, which looks a sequence up when it is admitted."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, metaclass=NamesItsFields):
    """How to draw the tokens of one request; checked when made.

    The order is: logits in float32 → ``allowed_token_ids``, ``bad_words``, ``min_tokens``, ``logit_bias`` → penalties →
    ``logits_hook`` → divided by ``temperature`` → ``min_p`` → ``top_k`` → ``top_p`` → one uniform number by inverse CDF
    (:mod:`refimpl.sampling.sampler`). Each filter keeps at least the most probable token. Greedy is the argmax after the
    hook. Log-probabilities are those of the raw logits, before all of this.

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
    presence_penalty: float = 0.0
    """Taken off the logit of every token that the output holds already, from -2 to 2."""
    frequency_penalty: float = 0.0
    """Taken off the logit of a token for each time that the output holds it, from -2 to 2."""
    repetition_penalty: float = 1.0
    """Divides the positive logits, and multiplies the negative ones, of tokens in the prompt or the output (above 0)."""
    logit_bias: Mapping[int, float] | None = None
    """Added to the logits of these token ids; beyond -100 and 100 it is taken as that."""
    allowed_token_ids: tuple[int, ...] | None = None
    """Draw from these ids alone."""
    bad_words: tuple[str, ...] = ()
    """Texts that are not generated, nor with a space before them: the last token of one is never drawn after its others."""
    logits_hook: LogitsHook | None = None
    """Called for each row of this request's logits; see :class:`LogitsHook`."""
    seed: int | None = None
    """Two requests with the same prompt, parameters and seed draw the same tokens, alone or in any batch.
    None takes the engine's seed mixed with the request's arrival number."""
    max_tokens: int | None = 16
    """The most tokens to generate; None goes on to ``max_model_len``."""
    min_tokens: int = 0
    """No end-of-sequence id and no stop token is drawn, and no stop string counts, before so many output tokens."""
    stop: tuple[str, ...] = ()
    """Texts that end a sample where the first of them is complete in the output's text (of several that are complete with
    the same character, the first in the list); they are left out. A single string is one. What could still become one is
    held back from streams."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end a sample, besides the model's own end-of-sequence ids. The id stays in ``token_ids``; it has no text."""
    include_stop_str_in_output: bool = False
    """Keep the stop string, or the text of the id that ended a sample, at the end of the text."""
    ignore_eos: bool = False
    """Go on past the model's end-of-sequence ids (for benchmarks)."""
    logprobs: int | None = None
    """Return the log-probability of each output token, and those of so many most probable ones (0: its own alone;
    -1: the whole vocabulary)."""
    prompt_logprobs: int | None = None
    """The same for each token of the prompt. Such a request does not read the prefix cache."""
    return_logits: tuple[int, ...] = ()
    """Positions, in prompt and output, after whose token the raw logits are returned."""
    return_hidden_states: tuple[int, ...] = ()
    """Positions whose last hidden state (after the final norm) is returned."""
    detokenize: bool = True
    """Make text of the tokens; without, ``text`` stays empty."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text (never out of ``token_ids``)."""
    output_kind: OutputKind = "cumulative"
    """What ``Engine.step`` returns for a running request: all so far, only what is new, or nothing until its end."""

    def __post_init__(self) -> None:
        check = FieldChecks(self)
        check.whole("n", 1, 1024)
        check.number("temperature", 0, HOTTEST, f"a finite number, 0 (greedy) or more (at most {HOTTEST:g})")
        check.number("top_p", 0, 1, "a number from 0 (greedy) to 1 (off)")
        check.whole("top_k", -1, _INT64 - 1, "a whole number: 0 or -1 (off), or 1 and more")
        check.number("min_p", 0, 1, "a number from 0 (off) to 1")
        check.number("presence_penalty", -2, 2)
        check.number("frequency_penalty", -2, 2)
        check.number("repetition_penalty", 1e-6, 1e6, "a number above 0 (1 is off)")
        check.whole("seed", -_INT64, _INT64 - 1, "None or a whole number of 64 bits", none=True)
        check.whole("max_tokens", 1, math.inf, "None (up to max_model_len) or a whole number, 1 or more", none=True)
        check.whole("min_tokens", 0, _INT64 - 1, "a whole number, 0 or more")
        check.whole("logprobs", -1, _INT64 - 1, "None, -1 (the whole vocabulary), or a whole number, 0 or more", none=True)
        check.whole("prompt_logprobs", -1, _INT64 - 1, "None, -1 (all), or a whole number, 0 or more", none=True)
        check.that(
            "output_kind", lambda kind: kind in ("cumulative", "delta", "final_only"), "cumulative, delta or final_only"
        )
        check.flags("ignore_eos", "include_stop_str_in_output", "detokenize", "skip_special_tokens")
        for name in ("stop_token_ids", "return_logits", "return_hidden_states"):
            check.ids(name)
        if self.allowed_token_ids is not None:
            check.ids("allowed_token_ids", "None, or a list of at least one token id, each 0 or more", empty=False)
        check.texts("stop", "a text or a list of texts, none of them empty", str.__len__)
        check.texts("bad_words", "a list of texts, none of them blank", str.strip)
        bias = check.that("logit_bias", _is_bias, "None or a dict of token ids to finite numbers")
        check.set("logit_bias", _plain_bias(bias))
        check.that("logits_hook", lambda hook: hook is None or callable(hook), "None or a callable (token_ids, logits)")
        self._check_together()

    def _check_together(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise SamplingParamsError(f"min_tokens is {self.min_tokens}, above max_tokens = {self.max_tokens}")
        if self.stop and not self.detokenize:
            raise SamplingParamsError(f"stop is {self.stop!r}, but detokenize=False makes no text to find it in")

    @property
    def greedy(self) -> bool:
        """Whether no random number is drawn."""
        return self.temperature < GREEDY_BELOW

    @property
    def reads_prompt_logits(self) -> bool:
        """Whether every token of the prompt must be computed for what is returned: cached ones are of no use then."""
        return self.prompt_logprobs is not None or bool(self.return_logits) or bool(self.return_hidden_states)


def _plain_bias(bias: Mapping[int, float] | None) -> dict[int, float] | None:
    plain = {int(key): max(-BIAS_LIMIT, min(BIAS_LIMIT, float(value))) for key, value in (bias or {}).items()}
    return plain or None


def _is_bias(value: object) -> bool:
    if value is None:
        return True
    if not isinstance(value, Mapping):
        return False
    items: Iterable[tuple[object, object]] = value.items()
    return all(is_whole(key) and key >= 0 and is_number(bias) and abs(bias) < math.inf for key, bias in items)  # type: ignore[operator, arg-type]
