"""From the fields of a request to SamplingParams, with the server's limits."""

from __future__ import annotations

import math
from typing import Any

from refimpl.errors import SamplingParamsError
from refimpl.sampling_params import LogitsHook, OutputKind, SamplingParams
from refimpl.server.errors import ApiError, bad_request, of_engine
from refimpl.server.limits import Limits
from refimpl.server.protocol import SamplingFields

SAME_NAMES = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "min_tokens",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
    "bad_words",
    "allowed_token_ids",
)
"""Fields that are SamplingParams' own; null is its default."""


def check_limits(request: SamplingFields, limits: Limits, num_prompts: int) -> None:
    """See that a request asks for no more than the server gives.

    Raises:
        ApiError: it does.

    """
    n = 1 if request.n is None else request.n
    limits.check_number("n", n, limits.max_n)
    if n * num_prompts > limits.max_choices:
        raise bad_request(
            f"{num_prompts} prompts with n = {n} are {n * num_prompts} choices; the limit is {limits.max_choices}",
            "n",
            "limit_exceeded",
        )
    stop = [request.stop] if isinstance(request.stop, str) else request.stop
    limits.check_count("stop", stop, limits.max_stop)
    limits.check_count("bad_words", request.bad_words, limits.max_bad_words)
    for name, texts in (("stop", stop), ("bad_words", request.bad_words)):
        for text in texts or ():
            limits.check_count(name, text, limits.max_stop_chars, "characters in one text")
    limits.check_count("logit_bias", request.logit_bias, limits.max_bias)
    limits.check_count("stop_token_ids", request.stop_token_ids, limits.max_ids)
    limits.check_count("allowed_token_ids", request.allowed_token_ids, limits.max_ids)
    limits.check_count("cache_salt", request.cache_salt, limits.max_salt_chars, "characters")
    limits.check_count("user", request.user, limits.max_salt_chars, "characters")


def sampling_params(
    request: SamplingFields,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
    hook: LogitsHook | None,
) -> SamplingParams:
    """The parameters of a request.

    Raises:
        ApiError: one is out of its range.

    """
    given: dict[str, Any] = {name: value for name in SAME_NAMES if (value := getattr(request, name)) is not None}
    kind: OutputKind = "delta" if request.stream else "final_only"
    try:
        return SamplingParams(
            **given,
            max_tokens=max_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            logit_bias=_bias(request.logit_bias),
            logits_hook=hook,
            output_kind=kind,
        )
    except SamplingParamsError as error:
        raise _named(error) from error


def _named(error: SamplingParamsError) -> ApiError:
    """The engine's sentences begin with the field that is wrong."""
    answer = of_engine(error)
    first = str(error).partition(" ")[0]
    answer.param = first if first in SamplingFields.__struct_fields__ else None
    return answer


def _bias(given: dict[str, float] | None) -> dict[int, float] | None:
    bias = {}
    for key, value in (given or {}).items():
        if not (key.isascii() and key.isdigit()) or len(key) > 10 or not math.isfinite(value):
            raise bad_request(
                f"logit_bias has {key[:50]!r}: {value}; it must map token ids, as strings, to finite numbers", "logit_bias"
            )
        bias[int(key)] = value
    return bias or None


def count(name: str, asked: int | None, most: int) -> int | None:
    """A number of log-probabilities, within what the engine gives (-1: any).

    Raises:
        ApiError: it is more, or negative.

    """
    if asked is not None and (asked < 0 or -1 < most < asked):
        allowed = f"from 0 to {most}" if most != -1 else "0 or more"
        raise bad_request(f"{name} is {asked}; this server gives {allowed} a token (--max-logprobs)", name, "limit_exceeded")
    return asked
