"""From SamplingParams to SamplingNumbers: what only the model and the tokenizer can tell is checked and filled in here."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import msgspec

from refimpl.config import ModelConfig
from refimpl.errors import SamplingParamsError
from refimpl.sampling.bad_words import ways_to_write
from refimpl.sampling_numbers import SamplingNumbers, plain_numbers
from refimpl.sampling_params import SamplingParams
from refimpl.tokenizer.tokenizer import Tokenizer


class SamplingIntake:
    """Turns the parameters of one request after the other into numbers."""

    def __init__(self, tokenizer: Tokenizer, model: ModelConfig, max_logprobs: int) -> None:
        self._vocab_size = model.vocab_size
        self._eos_token_ids = model.eos_token_ids
        self._max_logprobs = max_logprobs
        # The same words come with request after request.
        self._ways_to_write = functools.lru_cache(maxsize=4096)(lambda text: ways_to_write(text, tokenizer))

    def numbers(self, params: SamplingParams) -> SamplingNumbers:
        """The numbers of a request.

        Raises:
            SamplingParamsError: an id is outside the vocabulary, more log-probabilities are asked for than the engine
                allows, or no token could ever be drawn.

        """
        bias, allowed = params.logit_bias or {}, params.allowed_token_ids or ()
        self._check_ids("logit_bias", bias)
        self._check_ids("allowed_token_ids", allowed)
        numbers = msgspec.structs.replace(
            plain_numbers(params),
            logit_bias=tuple(sorted(bias.items())),
            allowed_token_ids=tuple(sorted(set(allowed))),
            bad_word_ids=self._bad_word_ids(params.bad_words),
            min_tokens=params.min_tokens,
            ending_ids=self._ending_ids(params) if params.min_tokens else (),
            logprobs=self._num_logprobs("logprobs", params.logprobs),
            prompt_logprobs=self._num_logprobs("prompt_logprobs", params.prompt_logprobs),
        )
        self._check_that_something_is_left(numbers)
        return numbers

    def _check_ids(self, name: str, token_ids: Iterable[int]) -> None:
        for token_id in token_ids:
            if token_id >= self._vocab_size:
                raise SamplingParamsError(
                    f"{name} names token id {token_id}, which is outside the vocabulary: ids go from 0 to "
                    f"{self._vocab_size - 1}",
                    token_id=token_id,
                    vocab_size=self._vocab_size,
                )

    def _bad_word_ids(self, texts: Iterable[str]) -> tuple[tuple[int, ...], ...]:
        ways = (way for text in texts for way in self._ways_to_write(text))
        return tuple(dict.fromkeys(way for way in ways if max(way) < self._vocab_size))

    def _ending_ids(self, params: SamplingParams) -> tuple[int, ...]:
        eos = () if params.ignore_eos else self._eos_token_ids
        return tuple(sorted({i for i in (*eos, *params.stop_token_ids) if i < self._vocab_size}))

    def _num_logprobs(self, name: str, asked: int | None) -> int | None:
        if asked is None:
            return None
        count = self._vocab_size if asked == -1 else asked
        if self._max_logprobs != -1 and count > self._max_logprobs:
            whole = f" (the whole vocabulary, {count})" if asked == -1 else ""
            raise SamplingParamsError(
                f"{name} is {asked}{whole}, but this engine gives at most max_logprobs = {self._max_logprobs}; "
                "ask for fewer, or make the engine with a larger max_logprobs (-1: no limit)",
                asked=count,
                max_logprobs=self._max_logprobs,
            )
        return min(count, self._vocab_size)

    def _check_that_something_is_left(self, numbers: SamplingNumbers) -> None:
        """Count what no token drawn could change: ids that are never drawn, and those of ``min_tokens``."""
        never = {way[0] for way in numbers.bad_word_ids if len(way) == 1}
        allowed = set(numbers.allowed_token_ids)
        if not (allowed - never if allowed else len(never) < self._vocab_size):
            raise SamplingParamsError("allowed_token_ids and bad_words leave no token to draw; allow others")
        never.update(numbers.ending_ids)
        if not (allowed - never if allowed else len(never) < self._vocab_size):
            raise SamplingParamsError(
                f"min_tokens is {numbers.min_tokens}, but all tokens that may be drawn end the text; allow others"
            )
