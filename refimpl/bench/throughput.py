"""Output tokens a second beside other engines on this machine: the same weights, dtype, threads and requests, greedy.

Three workloads: one request and eight that decode together (the rate after their first tokens), and a mix of short and long
ones that are all there at once (the rate over everything). Transformers answers the mix in static batches of 8, in the order
of arrival, and, as its users would if they knew the lengths beforehand, sorted by output length.

With a budget of time a row that would take too long is made smaller for all sides alike, by as much as a short trial says:
first its repeats become three, then its lengths shrink, and last its repeats become one. The row tells both (``repeats``,
``shrink``).
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from refimpl.bench.peers import BATCH, CANDIDATES, TRIAL_TOKENS, Transformers, open_sides, refuse_random_weights
from refimpl.bench.result import Check, Result, check, setting, workload_hash
from refimpl.bench.rows import DoesNotFit, Figures, Rows, chosen
from refimpl.bench.sides import Requests, Run, Side, in_turn, mixed, ratio, same_length, spread, tell_sides
from refimpl.errors import ConfigError
from refimpl.loading.checkpoint import open_checkpoint

BOUNDS: dict[tuple[str, str], dict[str, float]] = {
    # AVX2 has no products of bfloat16: torch's, which transformers calls, are slow there; ours read float16 (cpu_products).
    ("bfloat16", "AVX2"): {
        "decode_b1": 1.1,
        "decode_b8": 2.2,
        "mixed_32": 2.0,
        "decode_b1_vllm": 1.05,
        "decode_b8_vllm": 1.1,
    },
    ("float32", "AVX2"): {"decode_b1": 1.05, "decode_b8": 1.1, "mixed_32": 2.0},
    ("bfloat16", "AVX512"): {
        "decode_b1": 1.5,
        "decode_b8": 1.45,
        "mixed_32": 2.0,
        "decode_b1_vllm": 1.0,
        "decode_b8_vllm": 1.0,
    },
    ("float32", "AVX512"): {"decode_b1": 1.15, "decode_b8": 1.25, "mixed_32": 2.0},
}
"""What a ratio must be at least, by dtype and what the CPU multiplies with.

A decode step of few requests reads every weight once, on all sides, at a bandwidth that is the machine's. Of 538 MB in
float32 that is 41 ms at 13 GB/s, of which no engine saves anything; what differs is how far the products reach the
bandwidth and what lies between them. So a large factor over a peer is a peer that leaves bandwidth unused, never the bound
of ours. With AVX-512, and AMX more so, transformers' bfloat16 leaves little: of a step of 21.6 ms for one request 14.8 are
products. The bounds of AVX-512 count on a C++ compiler (:mod:`refimpl.kernels.native`); without one they are 10 to 17% less.
"""
LARGEST_GAP = {"float64": 1e-9, "float32": 1e-3, "bfloat16": 0.5, "float16": 0.1}
"""Where two sides part, transformers' logit of our token is at most this far under its largest: a tie, up to rounding."""
PROMPT, OUTPUT = 37, 128
SHORTEST, LONGEST = 16, 256
SHRINKS = (1.0, 0.5, 0.25, 0.125)
"""What the lengths of a row that would take too long are multiplied with, the first that fits."""
FEWEST_REPEATS = 3
"""Repeats that a row keeps before its lengths shrink."""
TRIAL = 1 / 16
"""The same for the trial that says how long a row takes."""


@dataclass(frozen=True)
class Workload:
    """Requests, and the rate that counts."""

    requests: Callable[[float, int], Requests]
    """Of a scale of the lengths, and a vocabulary's size."""
    rate: Callable[[Run], float]


def _scaled(length: int, scale: float) -> int:
    return max(2, round(length * scale))


def _together(count: int) -> Callable[[float, int], Requests]:
    return lambda scale, vocab_size: same_length(count, _scaled(PROMPT, scale), _scaled(OUTPUT, scale), vocab_size)


def _mixed(scale: float, vocab_size: int) -> Requests:
    return mixed(32, _scaled(SHORTEST, scale), _scaled(LONGEST, scale), vocab_size)


WORKLOADS = {
    "decode_b1": Workload(_together(1), lambda run: run.decode_rate),
    "decode_b8": Workload(_together(8), lambda run: run.decode_rate),
    "mixed_32": Workload(_mixed, lambda run: run.rate),
}


def run(
    engine_options: dict[str, Any],
    repeats: int = 5,
    dtypes: Sequence[str] = ("bfloat16", "float32"),
    compare: bool = True,
    compare_python: Path | None = None,
    scale: float = 1.0,
    workloads: Sequence[str] | None = None,
    max_minutes: float | None = None,
) -> Result:
    """Measure the workloads in each dtype; ``scale`` shrinks their lengths.

    Args:
        engine_options: of our engine; dtype, lengths and prefix cache are the comparison's.
        repeats: times that every side runs, in turn.
        dtypes: torch dtypes by name.
        compare: with transformers.
        compare_python: the Python of an environment with vLLM's CPU build.
        scale: at most 1.
        workloads: by name; None is all.
        max_minutes: for everything; what does not fit is made smaller or left out, and the result says so.

    Raises:
        ConfigError: a number, a dtype or a workload is out of range.

    """
    refuse_random_weights(engine_options)
    _check_numbers(repeats, dtypes, scale)
    names = chosen(workloads, list(WORKLOADS))
    rows = Rows([_named(name, dtype) for dtype in dtypes for name in names], _tell, max_minutes)
    checkpoint = open_checkpoint(engine_options["model"])
    vocab_size = checkpoint.config.vocab_size
    longest, size = 2 * max(_scaled(length, scale) for length in (PROMPT, OUTPUT, LONGEST)), _ranks(engine_options)
    checks: list[Check] = []
    with rows.kept_when_interrupted():
        for dtype in dtypes:
            with open_sides(engine_options, checkpoint, dtype, 32, longest, compare, compare_python) as sides:
                for name in names:
                    row = partial(_measure, sides, WORKLOADS[name], vocab_size, scale, repeats)
                    if figures := rows.measure(_named(name, dtype), row):
                        checks += _checks(name, dtype, figures)
    lengths = [_scaled(length, scale) for length in (PROMPT, OUTPUT, SHORTEST, LONGEST)]
    return Result(
        topic="throughput" if size == 1 else f"throughput_tp{size}",
        setting=setting(
            checkpoint,
            tensor_parallel_size=size,
            dtype=" and ".join(dtypes),
            workload=f"{lengths[0]} tokens in and {lengths[1]} out, alone and eight at once; 32 requests of {lengths[2]} to "
            f"{lengths[3]} in and out; greedy, no prefix cache",
            workload_hash=workload_hash([workload.requests(scale, vocab_size) for workload in WORKLOADS.values()]),
            tokens_produced=sum(
                row["output_tokens"] * (row["discarded"] + row["repeats"]) for row in rows.measured().values()
            ),
            repeats=repeats,
        ),
        results=rows.all(),
        checks=checks,
    )


def _ranks(engine_options: dict[str, Any]) -> int:
    return int(engine_options.get("tensor_parallel_size", 1))


def _check_numbers(repeats: int, dtypes: Sequence[str], scale: float) -> None:
    unknown = [dtype for dtype in dtypes if dtype not in LARGEST_GAP]
    if repeats < 1 or not 0 < scale <= 1 or unknown:
        raise ConfigError(
            f"repeats is {repeats}, scale {scale}, dtypes {', '.join(dtypes)}; they must be 1 or more, over 0 to 1, and of "
            f"{', '.join(LARGEST_GAP)}"
        )


def _named(name: str, dtype: str) -> str:
    return name if dtype == "bfloat16" else f"{name}_{dtype}"


def _tell(figures: Figures) -> str:
    smaller = "" if figures["shrink"] == 1 else f", lengths × {figures['shrink']:g}"
    return tell_sides(figures, "tokens_per_second", "tokens/s") + smaller


def _checks(name: str, dtype: str, figures: Figures) -> list[Check]:
    """Ratios that have a bound, and that all sides drew the tokens that they should."""
    listed = []
    bounds = BOUNDS.get((dtype, torch.backends.cpu.get_cpu_capability()), {})
    for peer, value in figures["ratios"].items():
        row = name if peer == "transformers" else f"{name}_{peer}"
        if (bound := bounds.get(row)) is not None:
            listed.append(check(_named(row, dtype), value, ">=", bound))
    if "largest_gap" in figures:
        listed.append(check(_named(f"{name}_largest_gap", dtype), figures["largest_gap"], "<=", LARGEST_GAP[dtype]))
    listed.append(check(_named(f"{name}_tokens_missing", dtype), figures["tokens_missing"], "<=", 0))
    return listed


def _measure(
    sides: dict[str, Side], workload: Workload, vocab_size: int, scale: float, repeats: int, seconds: float
) -> Figures:
    """Rates of every side, ratios of ours to each, and what the tokens say, in about so many seconds."""
    until, shrink = time.perf_counter() + seconds, 1.0
    tried = seconds < math.inf
    if tried:
        shrink, repeats = _fitted(sides, lambda part: workload.requests(scale * part, vocab_size), repeats, until)
    requests = workload.requests(scale * shrink, vocab_size)
    peer = sides.get("transformers")
    if isinstance(peer, Transformers):
        peer.choose(requests[:BATCH], until)
    # What a side does at its first call is no part of a turn: after a trial it is done.
    runs = in_turn(_turns(sides, requests), repeats, until, discarded=0 if tried else 1)
    rates = {name: [workload.rate(run) for run in listed] for name, listed in runs.items()}
    figures: Figures = {
        "tokens_per_second": {name: spread(values) for name, values in rates.items()},
        "ratios": {name: ratio(rates["refimpl"], values) for name, values in rates.items() if name != "refimpl"},
        "shrink": shrink,
        "repeats": len(rates["refimpl"]),
        "discarded": 0 if tried else 1,
        "output_tokens": sum(output for _, output in requests),
        "settings": {name: side.settings for name, side in sides.items()},
        "tokens_missing": _missing(requests, list(itertools.chain(*runs.values()))),
    }
    if isinstance(peer, Transformers):
        figures |= _compare(peer, requests, {name: runs[name][-1].token_ids for name in sides})
    return figures


def _turns(sides: dict[str, Side], requests: Requests) -> dict[str, Callable[[], Run]]:
    """What runs in a turn: every side, and transformers once more where an order by length would help it."""
    turns: dict[str, Callable[[], Run]] = {name: partial(side.run, requests) for name, side in sides.items()}
    if "transformers" in sides and len(requests) > BATCH:
        by_output = sorted(requests, key=lambda request: request[1])
        turns["transformers, sorted by output length"] = partial(sides["transformers"].run, by_output)
    return turns


def _fitted(
    sides: dict[str, Side], requests_of: Callable[[float], Requests], repeats: int, until: float
) -> tuple[float, int]:
    """By how much the lengths shrink and how often a row repeats to end by ``until``, guessed from much shorter requests.

    Raises:
        DoesNotFit: not even the shortest lengths do, once.

    """
    trial = requests_of(TRIAL)
    for _ in range(2):  # the second time counts
        started = time.perf_counter()
        for turn in _turns(sides, trial).values():
            turn()
        took = time.perf_counter() - started
        if time.perf_counter() + took > until:
            break
    left = until - time.perf_counter()
    for shrink in SHRINKS:
        requests = requests_of(shrink)
        turn_seconds = took * _tokens(requests) / _tokens(trial)
        others = _other_turns(sides, requests)
        fitting = int(left / turn_seconds - others)
        if fitting >= min(repeats, FEWEST_REPEATS):
            return shrink, min(repeats, fitting)
    if fitting < 1:
        raise DoesNotFit(
            f"with lengths × {shrink:g} and one repeat it takes about {turn_seconds * (others + 1):.0f} seconds, and "
            f"{max(0.0, left):.0f} were left for it"
        )
    return shrink, fitting


def _other_turns(sides: dict[str, Side], requests: Requests) -> float:
    """What a row costs beside its repeats, in turns: choosing transformers' setting, and asking it for logits."""
    if "transformers" not in sides:
        return 0
    return 1 + 2 * len(CANDIDATES) * min(1, TRIAL_TOKENS / max(output for _, output in requests))


def _tokens(requests: Requests) -> int:
    """In and out: what the time of a turn goes with, roughly."""
    return sum(len(prompt) + output for prompt, output in requests)


def _compare(peer: Transformers, requests: Requests, answers: dict[str, list[list[int]]]) -> dict[str, Any]:
    """Where our tokens part from another side's, transformers' logits say whether that is a tie."""
    gaps = {
        name: [
            peer.gap(prompt, ours, other)
            for (prompt, _), ours, other in zip(requests, answers["refimpl"], theirs, strict=True)
        ]
        for name, theirs in answers.items()
        if name != "refimpl"
    }
    return {
        "largest_gap": max(map(max, gaps.values())),
        "same_answers": {name: sum(gap == 0 for gap in listed) for name, listed in gaps.items()},
    }


def _missing(requests: Requests, runs: list[Run]) -> int:
    """Tokens that were asked for and did not come, or came unasked."""
    asked = sum(output for _, output in requests)
    return max(abs(asked - sum(map(len, run.token_ids))) for run in runs)
