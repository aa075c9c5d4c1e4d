"""A side of a comparison: an engine that answers the same requests greedily, timed from the first call to the last token.

:class:`Refimpl` is ours. :mod:`refimpl.bench.peers` has transformers and engines of other environments.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any, Protocol

from tqdm import tqdm

from refimpl.config import EngineArgs
from refimpl.engine import Engine
from refimpl.sampling_params import SamplingParams

Requests = list[tuple[list[int], int]]
"""(prompt, output tokens) each; the end-of-text token is ignored, so that every side draws equally many."""


@dataclass(frozen=True)
class Run:
    """What a side made of the requests. Seconds count from the moment in which it was given all of them."""

    first_tokens: float
    """Until every request of the first batch had a token."""
    total: float
    token_ids: list[list[int]]
    """In the order of the requests."""
    steps: list[float] = field(default_factory=list)
    """Of our engine: from the end of each step to the end of the next one."""

    @property
    def decode_rate(self) -> float:
        """Tokens a second after the first ones; for requests that run together from beginning to end."""
        after_first = sum(len(ids) for ids in self.token_ids) - len(self.token_ids)
        return after_first / (self.total - self.first_tokens)

    @property
    def rate(self) -> float:
        """Output tokens a second over everything."""
        return sum(len(ids) for ids in self.token_ids) / self.total


class Side(Protocol):
    """One engine, with its weights loaded."""

    name: str
    settings: dict[str, Any]
    """What was chosen for it, for the result's JSON."""

    def run(self, requests: Requests) -> Run:
        """Answer the requests, all of which are there at once."""

    def close(self) -> None:
        """Give the memory back."""


class Refimpl:
    """Our engine, with the options of the command line but for what the comparison fixes."""

    name = "refimpl"

    def __init__(self, engine_options: dict[str, Any], dtype: str, max_num_seqs: int, max_model_len: int) -> None:
        fixed = {
            "dtype": dtype,
            "max_num_seqs": max_num_seqs,
            "max_model_len": max_model_len,
            "max_num_batched_tokens": max(max_num_seqs, max_model_len, 2048),
            "enable_prefix_caching": False,
            "event_log_size": 0,
        }
        self.settings: dict[str, Any] = fixed
        self._engine = Engine(EngineArgs.from_options(engine_options | fixed))

    def run(self, requests: Requests) -> Run:
        """Queue all requests and step until none is left."""
        return serve(self._engine, requests)

    def close(self) -> None:
        """Close the engine."""
        self._engine.close()


def serve(engine: Engine, requests: Requests, detokenize: bool = True, temperature: float = 0.0) -> Run:
    """Queue all requests and step until none is left."""
    answers: dict[str, list[int]] = {}
    first = None
    started = time.perf_counter()
    for number, (prompt, output) in enumerate(requests):
        params = SamplingParams(
            temperature=temperature, max_tokens=output, ignore_eos=True, detokenize=detokenize, output_kind="final_only"
        )
        engine.add_request(str(number), prompt, params)
    ends = []
    while engine.has_unfinished_requests():
        outputs = engine.step()
        ends.append(time.perf_counter() - started)
        if first is None and not len(engine.scheduler.waiting):
            first = ends[-1]
        answers |= {output.request_id: output.outputs[0].token_ids for output in outputs}
    total = time.perf_counter() - started
    steps = [after - before for before, after in pairwise(ends)]
    return Run(first or total, total, [answers[str(number)] for number in range(len(requests))], steps)


def in_turn(
    sides: Mapping[str, Callable[[], Run]], repeats: int, until: float = math.inf, discarded: int = 1
) -> dict[str, list[Run]]:
    """Run every side ``repeats`` times in turn, so that all see the same machine, after turns that are ``discarded``.

    Repeats that would not end by ``until`` (of ``time.perf_counter``) are left out, but for the first of them.
    """
    runs: dict[str, list[Run]] = {name: [] for name in sides}
    started = time.perf_counter()
    for turn in tqdm(range(discarded + repeats), desc=" and ".join(sides), unit="turn", leave=False, disable=None):
        now = time.perf_counter()
        if turn > discarded and now + (now - started) / turn > until:
            break
        for name, side in sides.items():
            run = side()
            if turn >= discarded:
                runs[name].append(run)
    return runs


def spread(values: list[float]) -> dict[str, float]:
    """Median and range."""
    return {"median": median(values), "min": min(values), "max": max(values)}


def tell_sides(figures: dict[str, Any], of: str, unit: str, factor: float = 1.0) -> str:
    """One line of a row's medians, and of what ours is over each other's."""
    told = []
    for name, value in figures[of].items():
        over = f" (refimpl over it: {figures['ratios'][name]:.2f})" if name in figures["ratios"] else ""
        told.append(f"{name} {factor * value['median']:,.1f} {unit}{over}")
    return ", ".join(told)


def ratio(ours: list[float], theirs: list[float]) -> float:
    """The median of the ratios of neighbouring runs: a slow minute of the machine slows both of a pair."""
    return median(a / b for a, b in zip(ours, theirs, strict=True))


def prompt(length: int, salt: int, vocab_size: int) -> list[int]:
    """Made-up ids. No two salts begin alike, so that no side gains by a shared prefix."""
    drawn = random.Random(salt)  # noqa: S311 - a workload, no secret
    return [drawn.randrange(min(vocab_size - 1, 100), vocab_size) for _ in range(length)]


def same_length(count: int, length: int, output: int, vocab_size: int) -> Requests:
    """Requests that begin and end together."""
    return [(prompt(length, salt, vocab_size), output) for salt in range(count)]


def mixed(count: int, shortest: int, longest: int, vocab_size: int) -> Requests:
    """Prompts and outputs each of ``shortest`` to ``longest`` tokens, evenly spread and shuffled with a fixed seed."""
    spread = [shortest + (longest - shortest) * i // max(1, count - 1) for i in range(count)]
    drawn = random.Random(0)  # noqa: S311 - a workload, no secret
    prompts, outputs = drawn.sample(spread, count), drawn.sample(spread, count)
    return [
        (prompt(length, salt, vocab_size), output)
        for salt, (length, output) in enumerate(zip(prompts, outputs, strict=True))
    ]
