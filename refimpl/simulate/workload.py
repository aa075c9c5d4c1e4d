"""Workloads: which requests come when. Lengths are given, drawn, or read; arrivals are all at once, even, or Poisson.

All chance comes from ``Random.random``, which Python promises to keep: a seed means the same requests everywhere.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from refimpl.errors import ConfigError

SHORT_LONG = "64/50*2,2000*1"
"""Prompts of 64 tokens; two thirds of the answers have 50 tokens, one third 2,000."""
NAMED = {"chat": "128-512/64-256", "short-long": SHORT_LONG, "long-prompts": "2000-7000/50-300"}
"""Mixes of lengths with a name."""
ARRIVALS = ("poisson", "even")


@dataclass(frozen=True)
class TraceRequest:
    """One request of a trace: its arrival in seconds since the first one's, its prompt and its output in tokens."""

    arrival: float
    prompt: int
    output: int


Draw = Callable[[random.Random], int]


def mixed(lengths: str, count: int, seed: int) -> list[TraceRequest]:
    """``count`` requests of lengths PROMPT/OUTPUT, all at second 0.

    Each of the two is a number of tokens (``512``), a range of which every length is as likely (``128-512``), or choices
    with weights (``50*2,2000*1``). The choices of both come in their exact shares, shuffled.

    Raises:
        ConfigError: the lengths are not of that form, or the count is below 1.

    """
    check_count(count)
    parts = NAMED.get(lengths, lengths).split("/")
    if len(parts) != 2:
        raise _wrong_lengths(lengths)
    rng = random.Random(seed)  # noqa: S311 - a workload, no secret
    prompts, outputs = (_lengths(part, count, rng, lengths) for part in parts)
    return [TraceRequest(0.0, prompt, output) for prompt, output in zip(prompts, outputs, strict=True)]


def check_count(count: int) -> None:
    """See that there is at least one request.

    Raises:
        ConfigError: there is none.

    """
    if count < 1:
        raise ConfigError(f"{count} requests were asked for; give 1 or more", count=count)


def _wrong_lengths(given: str) -> ConfigError:
    return ConfigError(
        f"the lengths {given!r} are not PROMPT/OUTPUT in tokens, each a number >= 1 (512), a range (128-512), or choices "
        f"with weights (50*2,2000*1); give such lengths, or one of {', '.join(NAMED)}"
    )


def _lengths(part: str, count: int, rng: random.Random, given: str) -> list[int]:
    if match := re.fullmatch(r"(\d+)-(\d+)", part):
        low, high = int(match[1]), int(match[2])
        if not 1 <= low <= high:
            raise _wrong_lengths(given)
        return [low + int(rng.random() * (high - low + 1)) for _ in range(count)]
    choices: list[tuple[int, float]] = []
    for choice in part.split(","):
        match = re.fullmatch(r"(\d+)(?:\*(\d+(?:\.\d+)?))?", choice)
        if match is None or int(match[1]) < 1 or not float(match[2] or 1) > 0:
            raise _wrong_lengths(given)
        choices.append((int(match[1]), float(match[2] or 1)))
    return _in_shares(choices, count, rng)


def _in_shares(choices: list[tuple[int, float]], count: int, rng: random.Random) -> list[int]:
    """Each choice as often as its weight says, rounded; in random order."""
    if len(choices) == 1:
        return [choices[0][0]] * count
    whole = sum(weight for _, weight in choices)
    edges = [round(count * edge / whole) for edge in accumulate((weight for _, weight in choices), initial=0.0)]
    listed = [length for (length, _), a, b in zip(choices, edges, edges[1:], strict=False) for _ in range(b - a)]
    return sorted(listed, key=lambda _: rng.random())


def arrive(requests: Sequence[TraceRequest], rate: float | None, seed: int, arrivals: str = "poisson") -> list[TraceRequest]:
    """The same requests at ``rate`` a second: a Poisson process, or evenly. The first comes at second 0.

    With ``rate`` None they keep their times; with infinity they all come at once.

    Raises:
        ConfigError: the rate is not above 0, or the arrivals have no such name.

    """
    if arrivals not in ARRIVALS:
        raise ConfigError(f"arrivals is {arrivals!r}; it must be one of {', '.join(ARRIVALS)}")
    if rate is None:
        return list(requests)
    if math.isnan(rate) or not rate > 0:
        raise ConfigError(f"the rate is {rate:g} requests a second; it must be above 0 (inf: all at once)")
    rng = random.Random(seed ^ 0x5EED)  # noqa: S311 - not the stream of the lengths
    gaps = (
        (-math.log(1 - rng.random()) / rate if arrivals == "poisson" else 1 / rate) for _ in range(max(0, len(requests) - 1))
    )
    times = accumulate(gaps, initial=0.0)
    return [replace(request, arrival=time) for request, time in zip(requests, times, strict=True)]
