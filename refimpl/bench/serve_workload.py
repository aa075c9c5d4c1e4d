"""What is asked of a server: lengths and prompts by a workload's name, and times by a rate.

============================  ======================================================================================
PROMPT/OUTPUT, chat, …        lengths as ``refimpl simulate`` takes them (64-1024/16-512); random tokens
mixed                         the requests that vLLM was measured with (:mod:`refimpl.bench.offline`)
prefix:8*1024+64-256/64       8 groups, each with a prefix of 1,024 tokens of its own; behind it 64 to 256, 64 out
conv, code                    lengths and gaps between arrivals like those of Azure's traces
FILE.csv                      those of a trace with TIMESTAMP, ContextTokens, GeneratedTokens
FILE.jsonl                    the prompts of a file, in turn: texts, or token ids
============================  ======================================================================================

Random tokens are others in each row and in its warm-up. The prompts of ``mixed`` and of a file are the same, those of the
warm-up the first of them: a server that caches prefixes knows these before the first row, and all from the second row on.
For ``/chat/completions`` random tokens are replaced by as many short words, since messages are texts.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, cycle, islice
from pathlib import Path
from typing import Any

from refimpl.bench.arrivals import gaps
from refimpl.bench.open_loop import Ask
from refimpl.cli_prompts import read_prompts
from refimpl.errors import ConfigError
from refimpl.simulate.workload import TraceRequest, mixed

LOWEST_ID = 100
"""Ids below it may be special tokens."""
WORDS = re.findall(r"\w+", "the of and a to in is you that it he was for on are as with his they at be this have from or by")


@dataclass(frozen=True)
class Workload:
    """What is asked, and how often."""

    name: str = "chat"
    num_prompts: int = 200
    seed: int = 0
    burstiness: float = 1.0
    """Shape of the gaps' gamma distribution: 1 is Poisson, less makes bursts, more is even."""
    vocab_size: int = 1000
    """Random token ids are below it."""
    chat: bool = False
    max_tokens: int = 128
    """For prompts of a file that do not say."""

    def asks(self, rate: float | None, row: str = "") -> list[Ask]:
        """The requests, ``rate`` a second: all at once if it is infinite, and with None as in the trace.

        Each ``row`` has random tokens of its own: a server that caches prefixes would know those of the row before.

        Raises:
            ConfigError: the workload has no such form, a number is out of range, or a rate is missing.
            RefimplError: a file cannot be read.

        """
        if self.num_prompts < 1:
            raise ConfigError(f"num_prompts is {self.num_prompts}; it must be 1 or more")
        if self.vocab_size <= LOWEST_ID:
            raise ConfigError(f"vocab_size is {self.vocab_size}; it must be over {LOWEST_ID}, where special tokens may be")
        requests, timed = self._requests(row)
        if rate is None and not timed:
            raise ConfigError(f"the workload {self.name!r} has no times of its own; give a request_rate, or inf")
        times = [ask.at for ask in requests] if rate is None else self._times(rate, len(requests))
        return [replace(ask, at=at) for ask, at in zip(requests, times, strict=True)]

    def _times(self, rate: float, count: int) -> list[float]:
        if rate == math.inf:
            return [0.0] * count
        for name, value in (("request_rate", rate), ("burstiness", self.burstiness)):
            if not 0 < value < math.inf:
                raise ConfigError(f"{name} is {value:g}; it must be above 0 (a rate may be inf: all at once)")
        return list(islice(accumulate(gaps(rate, self.seed, self.burstiness)), count))

    def _requests(self, row: str) -> tuple[list[Ask], bool]:
        """The requests, and whether their times mean something."""
        from refimpl.bench.traces import generate, read_trace

        name, count = self.name, self.num_prompts
        if name in ("conv", "code"):
            return self._random(generate(name, count, self.seed), row), True
        if name.endswith((".csv", ".csv.gz")):
            return self._random(read_trace(Path(name))[:count], row), True
        if name.endswith(".jsonl"):
            return [self._read(line) for line in islice(cycle(_lines(Path(name))), count)], False
        if name.startswith("prefix:"):
            return self._shared(name.removeprefix("prefix:"), row), False
        if name == "mixed":
            from refimpl.bench.offline import requests_of, within_vocabulary

            drawn = within_vocabulary(requests_of(f"mixed-{count}"), max(self.vocab_size, LOWEST_ID + 1))
            return [Ask(0.0, self._said(prompt), output) for prompt, output in drawn], False
        return self._random(mixed(name, count, self.seed), row), False

    def _random(self, lengths: Sequence[TraceRequest], row: str) -> list[Ask]:
        return [
            Ask(one.arrival, self._said(self._ids(one.prompt, f"{row}prompt {number}")), one.output)
            for number, one in enumerate(lengths)
        ]

    def _shared(self, form: str, row: str) -> list[Ask]:
        """Groups of requests that begin with the same tokens, shuffled."""
        match = re.fullmatch(r"(\d+)\*(\d+)\+(.+)", form)
        if match is None or not int(match[1]) or not int(match[2]):
            raise ConfigError(
                f"the workload 'prefix:{form}' is not prefix:GROUPS*PREFIX+PROMPT/OUTPUT with lengths in tokens, such as "
                "prefix:8*1024+64-256/64"
            )
        groups, length = int(match[1]), int(match[2])
        prefixes = [self._ids(length, f"{row}prefix {group}") for group in range(groups)]
        behind = mixed(match[3], self.num_prompts, self.seed)
        order = [number % groups for number in range(self.num_prompts)]
        random.Random(self.seed).shuffle(order)  # noqa: S311 - a workload, no secret
        return [
            Ask(0.0, self._said([*prefixes[group], *self._ids(one.prompt, f"{row}prompt {number}")]), one.output)
            for number, (group, one) in enumerate(zip(order, behind, strict=True))
        ]

    def _ids(self, count: int, what: str) -> list[int]:
        drawn = random.Random(f"{self.seed} {what}")  # noqa: S311 - a workload, no secret
        return [drawn.randrange(LOWEST_ID, self.vocab_size) for _ in range(count)]

    def _said(self, token_ids: list[int]) -> str | list[int]:
        return " ".join(WORDS[token_id % len(WORDS)] for token_id in token_ids) if self.chat else token_ids

    def _read(self, line: Any) -> Ask:
        prompt = line if isinstance(line, str) else line.get("prompt", line.get("prompt_token_ids"))
        if self.chat and not isinstance(prompt, str):
            raise ConfigError(f"{self.name} has prompts of token ids; /chat/completions takes texts: leave out --chat")
        return Ask(0.0, prompt, self.max_tokens if isinstance(line, str) else line.get("max_tokens", self.max_tokens))


def _lines(path: Path) -> list[Any]:
    lines = read_prompts(path)
    if not lines:
        raise ConfigError(f"{path} has no prompts; give a file of one or more")
    return lines
