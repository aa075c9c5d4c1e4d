"""Rounds of speculation, measured beside what the law of them says (:mod:`refimpl.speculative.law`).

The same requests are answered without drafts and with each number of them, in turn. What was accepted by position, and the
costs c and v that the engine measured when it began, give the speed-up that is predicted; it stands beside the one that was
measured, so that a round that costs more than it should shows.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from refimpl.bench.sides import Requests, Run, in_turn, ratio, serve, spread
from refimpl.engine import Engine
from refimpl.errors import ConfigError
from refimpl.executor.local import LocalExecutor
from refimpl.executor.model_runner import ModelRunner
from refimpl.scheduler.drafting import DraftLength
from refimpl.speculative.costs import RoundCosts
from refimpl.speculative.law import tokens_a_round
from refimpl.speculative.lengths import AdaptiveLength, FixedLength
from refimpl.speculative_config import MOST_DRAFTS

ADAPTIVE = "adaptive"
LEAST_SHARE = 0.9
"""Of the prediction; under it something costs what it should not."""


class CountedLength:
    """A number of drafts, with a count of what became of them."""

    def __init__(self, length: DraftLength) -> None:
        self._length = length
        self.rows = 0
        """Of all steps."""
        self.rounds = 0
        """Those with drafts."""
        self.drafted = [0] * MOST_DRAFTS
        """Rows by position that had a draft there, those before it accepted."""
        self.accepted = [0] * MOST_DRAFTS
        self.chosen: dict[int, int] = {}
        """Steps by the number that was chosen."""

    def choose(self, num_sequences: int) -> tuple[int, int]:
        """What the length chooses."""
        number, rows = self._length.choose(num_sequences)
        self.chosen[number] = self.chosen.get(number, 0) + 1
        self.rows += num_sequences
        return number, rows

    def observe(self, num_drafts: int, num_accepted: int) -> None:
        """Count, and tell the length."""
        self.rounds += 1
        for place in range(min(num_drafts, num_accepted + 1)):
            self.drafted[place] += 1
            self.accepted[place] += place < num_accepted
        self._length.observe(num_drafts, num_accepted)

    def rates(self, num_drafts: int) -> list[float]:
        """Acceptance by position; of a position that no draft came to, that of the one before."""
        rates: list[float] = []
        for accepted, drafted in zip(self.accepted[:num_drafts], self.drafted, strict=False):
            rates.append(accepted / drafted if drafted else rates[-1] if rates else 0.0)
        return rates


@dataclass(frozen=True)
class Answered:
    """Requests that were answered in batches: the decoding alone."""

    tokens: int
    """After the first of each request."""
    seconds: float
    runs: list[Run]
    counted: CountedLength | None

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds


def runner_of(engine: Engine) -> ModelRunner:
    """What runs the steps of an engine on one device."""
    executor = engine.executor
    if not isinstance(executor, LocalExecutor):
        raise ConfigError("rounds of drafts are timed in one process; leave tensor_parallel_size out")
    return executor.runner


def costs_of(engine: Engine) -> RoundCosts:
    """What the engine measured when it began.

    Raises:
        ConfigError: it drafts a fixed number, and measured nothing.

    """
    length = engine.scheduler.drafting.length
    if not isinstance(length, AdaptiveLength):
        raise ConfigError("costs are measured where the number of drafts adapts; leave out adaptive of speculative_config")
    return length.costs


def answer(
    engine: Engine, requests: Requests, batch_size: int, length: DraftLength | None, temperature: float = 0.0
) -> Answered:
    """Answer requests in batches, with so many drafts; None drafts nothing."""
    drafting = engine.scheduler.drafting
    before, counted = drafting.length, None if length is None else CountedLength(length)
    drafting.length = counted
    try:
        runs = [
            serve(engine, requests[start : start + batch_size], detokenize=False, temperature=temperature)
            for start in range(0, len(requests), batch_size)
        ]
    finally:
        drafting.length = before
    tokens = sum(len(ids) - 1 for run in runs for ids in run.token_ids)
    return Answered(tokens, sum(run.total - run.first_tokens for run in runs), runs, counted)


def climb(
    engine: Engine,
    requests: Requests,
    batch_size: int,
    numbers: Sequence[int],
    repeats: int,
    *,
    most: int = 0,
    plain: Engine | None = None,
    temperature: float = 0.0,
    seconds: float = math.inf,
) -> dict[str, Any]:
    """Figures of each number of drafts, and of the one that adapts.

    Args:
        engine: with a proposer; its number of drafts adapts.
        requests: answered in batches of ``batch_size``.
        batch_size: sequences that run together.
        numbers: of drafts, each 1 or more; there may be none.
        repeats: times that all are answered, in turn.
        most: drafts where the number adapts, if that is more than ``numbers`` have.
        plain: the engine without speculation that they are held against; by default this one, drafting nothing.
        temperature: of all requests.
        seconds: within which all repeats are to end; those that would not are left out, but for the first.

    """
    costs, most = costs_of(engine), max(most, *numbers, 1)
    found: dict[str, list[Answered]] = {}

    def turn(name: str, make: Callable[[], DraftLength | None], asked: Engine) -> Callable[[], Run]:
        def once() -> Run:
            answered = answer(asked, requests, batch_size, make(), temperature)
            found.setdefault(name, []).append(answered)
            return answered.runs[0]

        return once

    turns = {"0": turn("0", lambda: None, plain or engine)}
    turns |= {str(number): turn(str(number), partial(FixedLength, number), engine) for number in numbers}
    turns[ADAPTIVE] = turn(ADAPTIVE, lambda: AdaptiveLength(most, costs), engine)
    in_turn(turns, repeats, time.perf_counter() + seconds)
    sides = {name: answered[1:] for name, answered in found.items()}
    without = [answered.rate for answered in sides.pop("0")]
    rungs = {name: _rung(name, answered, without, costs, batch_size) for name, answered in sides.items()}
    return {
        "batch_size": batch_size,
        "requests": len(requests),
        "prompt_tokens": sum(len(prompt) for prompt, _ in requests),
        "output_tokens": sum(output for _, output in requests),
        "tokens_per_second_without": spread(without),
        "rungs": rungs,
        "best": _best(rungs),
        "same_tokens": _same({name: answered[-1] for name, answered in found.items()}) if temperature == 0 else None,
    }


def _rung(name: str, answered: list[Answered], without: list[float], costs: RoundCosts, batch_size: int) -> dict[str, Any]:
    counted = [one.counted for one in answered if one.counted is not None]
    rounds, rows = sum(one.rounds for one in counted), sum(one.rows for one in counted)
    tokens = sum(one.tokens for one in answered)  # what was accepted beyond an end is none of them
    figures: dict[str, Any] = {
        "tokens_per_second": spread([one.rate for one in answered]),
        "measured": ratio([one.rate for one in answered], without),
        "tokens_a_round": tokens / rows,
        "drafted_share": min(1.0, rounds / rows),
    }
    if name == ADAPTIVE:
        steps = sum(sum(one.chosen.values()) for one in counted)
        chosen = {number: sum(one.chosen.get(number, 0) for one in counted) for number in range(MOST_DRAFTS + 1)}
        return figures | {"chosen": {number: count / steps for number, count in chosen.items() if count}}
    number = int(name)
    merged = CountedLength(FixedLength(number))
    merged.drafted = [sum(places) for places in zip(*(one.drafted for one in counted), strict=True)]
    merged.accepted = [sum(places) for places in zip(*(one.accepted for one in counted), strict=True)]
    rates, share = merged.rates(number), figures["drafted_share"]
    c, v = costs.c(batch_size, number), costs.v(batch_size, number)
    # A row for which nothing was found costs the search and a plain step, and brings one token.
    expected = share * tokens_a_round(rates, number) + (1 - share)
    figures |= {"acceptance": rates, "c": c, "v": v, "predicted": expected / (number * c + share * v + 1 - share)}
    return figures


def _best(rungs: Mapping[str, Mapping[str, Any]]) -> int:
    """The number that was the fastest; 0 where none was faster than none."""
    fixed = {name: rung["measured"] for name, rung in rungs.items() if name != ADAPTIVE}
    best = max(fixed, key=lambda name: fixed[name], default="0")
    return int(best) if fixed.get(best, 0) > 1 else 0


def _same(sides: Mapping[str, Answered]) -> dict[str, float]:
    """The share of requests whose tokens are those without drafts."""
    ids = {name: [one for run in answered.runs for one in run.token_ids] for name, answered in sides.items()}
    return {
        name: sum(a == b for a, b in zip(theirs, ids["0"], strict=True)) / len(theirs)
        for name, theirs in ids.items()
        if name != "0"
    }
