"""Grammars: text that must be JSON, fit a schema, a regular expression or a grammar. llguidance says which tokens may come.

A :class:`GrammarHook` is the logits hook of one request. It is a function of the tokens so far, as every hook: it is called
for a row after its tokens, wherever they were computed (again, after a preemption; a step ahead; in the check of drafts, of
which some are refused). The matchers that it keeps are a memory of where they stood, and are taken back where they must.
"""

from __future__ import annotations

import asyncio
import functools
import json
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from refimpl.server.errors import ApiError, bad_request
from refimpl.server.limits import Limits
from refimpl.server.protocol import ResponseFormat, SamplingFields, StructuredOutputs
from refimpl.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

Kind = Literal["json", "regex", "choice", "grammar"]
WHITESPACE = r"(\n {0,32}| ?)"
"""What may stand between the parts of JSON: a space, or a new line with its indentation. With any at all, a model that
begins with spaces may never end with them."""
ANY_OBJECT = '{"type":"object"}'


class GrammarHook:
    """Takes from logits what the grammar does not allow next, for all samples of one request.

    Args:
        start: a matcher before the first token; it is not moved.
        num_prompt_tokens: tokens that the grammar says nothing about.
        n: samples, each of which has a place in the grammar of its own.
        end_ids: the model's end-of-sequence ids; where the text may end, any of them may come.

    """

    def __init__(self, start: LLMatcher, num_prompt_tokens: int, n: int, end_ids: tuple[int, ...]) -> None:
        self._start = start
        self._end_ids = list(end_ids)
        self._num_prompt_tokens = num_prompt_tokens
        self._n = n
        self._places: list[_Place] = []

    def __call__(self, token_ids: Tensor, logits: Tensor) -> Tensor:
        """The logits ``[V]`` after ``token_ids`` ``[L]``, -inf where the text could not go on with that token."""
        told = token_ids[self._num_prompt_tokens :].tolist()
        place = self._place(told)
        if not place.move_to(told):
            return logits  # behind a draft that the grammar forbids, or behind the end: nobody draws from this row
        allowed = torch.frombuffer(bytearray(place.matcher.compute_logit_bias()), dtype=torch.uint8)
        if place.matcher.is_error():
            raise RuntimeError(place.matcher.get_error())
        allowed[self._end_ids] = allowed[self._end_ids[0]].item()
        return logits.masked_fill_(allowed[: len(logits)].to(logits.device) == 0, float("-inf"))

    def _place(self, told: list[int]) -> _Place:
        """That which goes furthest along these tokens; a further one while some sample may have none."""
        on_the_way = [place for place in self._places if told[: len(place.told)] == place.told]
        if on_the_way:
            return max(on_the_way, key=lambda place: len(place.told))
        if len(self._places) < self._n:
            self._places.append(_Place(self._start.deep_copy()))
            return self._places[-1]
        return max(self._places, key=lambda place: _num_shared(place.told, told))


class _Place:
    """A matcher, and the tokens that it has taken."""

    def __init__(self, matcher: LLMatcher) -> None:
        self.matcher = matcher
        self.told: list[int] = []

    def move_to(self, told: list[int]) -> bool:
        """Take back and take on until these are the tokens; whether the grammar allows them."""
        shared = _num_shared(self.told, told)
        if shared < len(self.told):
            self.matcher.rollback(len(self.told) - shared)
        taken = self.matcher.try_consume_tokens(told[shared:]) if shared < len(told) else 0
        self.told = told[: shared + taken]
        return len(self.told) == len(told)


def _num_shared(a: list[int], b: list[int]) -> int:
    """Tokens at the start that two texts have in common."""
    if a == b[: len(a)]:
        return len(a)
    return next(i for i, (x, y) in enumerate(zip(a, [*b, -1], strict=False)) if x != y)


class Grammars:
    """Makes hooks. The same schema comes with request after request, so those of late are kept."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._start = functools.lru_cache(maxsize=64)(self._make_start)

    async def hook(self, kind: Kind, text: str, num_prompt_tokens: int, n: int) -> GrammarHook:
        """The hook of a request; a grammar is read in a thread, since a large one takes long.

        Raises:
            ApiError: the grammar cannot be read, or is too complex.

        """
        start = await asyncio.to_thread(self._start, kind, text)
        return GrammarHook(start, num_prompt_tokens, n, self._eos_token_ids)

    @functools.cached_property
    def _guide(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        if not self._eos_token_ids:
            raise bad_request(
                "this model has no end-of-sequence token, so a grammar could not end its text", "response_format"
            )
        return LLTokenizer(self._tokenizer.backend.to_str(), n_vocab=self._vocab_size, eos_token=self._eos_token_ids[0])

    def _make_start(self, kind: Kind, text: str) -> LLMatcher:
        from llguidance import LLMatcher

        try:
            matcher = LLMatcher(self._guide, _grammar(kind, text), log_level=0)
        except ValueError as error:
            raise _unreadable(kind, str(error)) from error
        if matcher.is_error():
            raise _unreadable(kind, matcher.get_error())
        return matcher


def _grammar(kind: Kind, text: str) -> str:
    from llguidance import LLMatcher

    if kind == "json":
        return str(LLMatcher.grammar_from_json_schema(text, overrides={"whitespace_pattern": WHITESPACE}))
    if kind == "regex":
        return str(LLMatcher.grammar_from_regex(text))
    if kind == "choice":
        choices = " | ".join(json.dumps(one, ensure_ascii=False) for one in json.loads(text))
        return str(LLMatcher.grammar_from_lark(f"start: {choices}"))
    return str(LLMatcher.grammar_from_lark(text))


def _unreadable(kind: Kind, why: str) -> ApiError:
    lines = why.strip().splitlines() or ["it cannot be read"]
    what = "JSON schema" if kind == "json" else kind
    return bad_request(f"the {what} cannot be followed: {lines[0][:500]}", "response_format", "invalid_grammar")


def asked_grammar(request: SamplingFields, limits: Limits) -> tuple[Kind, str] | None:
    """What the text must be, by whichever field says it: its kind, and its text.

    Raises:
        ApiError: two fields say it, or one is wrong or too large.

    """
    structured = request.structured_outputs or StructuredOutputs()
    given: dict[str, tuple[Kind, Any]] = {
        "response_format": ("json", _schema(request.response_format)),
        "structured_outputs.json": ("json", structured.json),
        "structured_outputs.json_object": ("json", ANY_OBJECT if structured.json_object else None),
        "structured_outputs.regex": ("regex", structured.regex),
        "structured_outputs.choice": ("choice", structured.choice),
        "structured_outputs.grammar": ("grammar", structured.grammar),
        "guided_json": ("json", request.guided_json),
        "guided_regex": ("regex", request.guided_regex),
        "guided_choice": ("choice", request.guided_choice),
        "guided_grammar": ("grammar", request.guided_grammar),
    }
    found = [(name, kind, value) for name, (kind, value) in given.items() if value is not None]
    if not found:
        return None
    if len(found) > 1:
        raise bad_request(f"{' and '.join(name for name, _, _ in found)} are both given; give one of them", found[0][0])
    [(name, kind, value)] = found
    if request.ignore_eos or request.min_tokens:
        raise bad_request(f"{name} ends the text where it is complete; leave out ignore_eos and min_tokens", name)
    if kind == "choice" and not (value and all(value)):
        raise bad_request(f"{name} must be a list of texts, none of them empty", name)
    if kind == "json" and isinstance(value, str):
        value = _parsed(name, value)
    return kind, limits.check_schema(name, value)


def _parsed(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise bad_request(f"{name} is a text, but no JSON", name) from None


def _schema(given: ResponseFormat | None) -> Any:
    if given is None or given.type == "text":
        return None
    if given.type == "json_object":
        return ANY_OBJECT
    if given.type != "json_schema":
        raise bad_request(
            f"response_format.type is {given.type[:100]!r}; it must be text, json_object or json_schema", "response_format"
        )
    if given.json_schema is None or given.json_schema.schema is None:
        raise bad_request("response_format of type json_schema needs json_schema.schema", "response_format")
    return given.json_schema.schema
