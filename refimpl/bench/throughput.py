"""Output tokens a second beside other engines on this machine: the same weights, dtype, threads and requests, greedy.

Three workloads: one request and eight that decode together (the rate after their first tokens), and a mix of short and long
ones that are all there at once (the rate over everything). Transformers answers the mix in static batches of 8, in the order
of arrival, and, as its users would if they knew the lengths beforehand, sorted by output length.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from refimpl.bench.peers import BATCH, Transformers, open_sides
from refimpl.bench.result import Check, Result, check, setting, workload_hash
from refimpl.bench.sides import Requests, Run, Side, in_turn, mixed, ratio, same_length, spread
from refimpl.errors import ConfigError
from refimpl.loading.checkpoint import open_checkpoint

BOUNDS = {("decode_b1", "transformers"): 1.8, ("decode_b8", "transformers"): 2.2, ("mixed_32", "transformers"): 2.0}
BOUNDS |= {("decode_b1", "vllm"): 1.2, ("decode_b8", "vllm"): 1.1}
LARGEST_GAP = {"float64": 1e-9, "float32": 1e-3, "bfloat16": 0.5, "float16": 0.1}
"""Where two sides part, transformers' logit of our token is at most this far under its largest: a tie, up to rounding."""


@dataclass(frozen=True)
class Workload:
    """Requests, and the rate that counts."""

    name: str
    requests: Requests
    rate: Callable[[Run], float]


def workloads(
    vocab_size: int, prompt: int = 37, output: int = 128, shortest: int = 16, longest: int = 256
) -> list[Workload]:
    """The three of them."""
    return [
        Workload("decode_b1", same_length(1, prompt, output, vocab_size), lambda run: run.decode_rate),
        Workload("decode_b8", same_length(8, prompt, output, vocab_size), lambda run: run.decode_rate),
        Workload("mixed_32", mixed(32, shortest, longest, vocab_size), lambda run: run.rate),
    ]


def run(
    engine_options: dict[str, Any],
    repeats: int = 5,
    dtypes: tuple[str, ...] = ("bfloat16", "float32"),
    compare: bool = True,
    compare_python: Path | None = None,
    scale: float = 1.0,
) -> Result:
    """Measure all workloads in each dtype; ``scale`` shrinks their lengths.

    Args:
        engine_options: of our engine; dtype, lengths and prefix cache are the comparison's.
        repeats: times that every side runs, in turn.
        dtypes: torch dtypes by name.
        compare: with transformers.
        compare_python: the Python of an environment with vLLM's CPU build.
        scale: at most 1.

    Raises:
        ConfigError: a number or a dtype is out of range.

    """
    unknown = [dtype for dtype in dtypes if dtype not in LARGEST_GAP]
    if repeats < 1 or not 0 < scale <= 1 or unknown:
        raise ConfigError(
            f"repeats is {repeats}, scale {scale}, dtypes {', '.join(dtypes)}; they must be 1 or more, over 0 to 1, and of "
            f"{', '.join(LARGEST_GAP)}"
        )
    checkpoint = open_checkpoint(engine_options["model"])
    lengths = [max(2, round(length * scale)) for length in (37, 128, 16, 256)]
    listed = workloads(checkpoint.config.vocab_size, *lengths)
    results: dict[str, Any] = {}
    checks: list[Check] = []
    for dtype in dtypes:
        with open_sides(engine_options, checkpoint, dtype, 32, 2 * max(lengths), compare, compare_python) as sides:
            for workload in listed:
                figures = _measure(sides, workload, repeats)
                results[_named(workload.name, dtype)] = figures
                checks += _checks(workload.name, dtype, figures)
    produced = sum(output for workload in listed for _, output in workload.requests)
    return Result(
        topic="throughput",
        setting=setting(
            model=checkpoint.name,
            model_hash=checkpoint.fingerprint(),
            dtype=" and ".join(dtypes),
            workload=f"{lengths[0]} tokens in and {lengths[1]} out, alone and eight at once; 32 requests of {lengths[2]} to "
            f"{lengths[3]} in and out; greedy, no prefix cache",
            workload_hash=workload_hash([workload.requests for workload in listed]),
            tokens_produced=produced * len(dtypes) * (repeats + 1),
            repeats=repeats,
        ),
        results=results,
        checks=checks,
    )


def _named(name: str, dtype: str) -> str:
    return name if dtype == "bfloat16" else f"{name}_{dtype}"


def _checks(name: str, dtype: str, figures: dict[str, Any]) -> list[Check]:
    """Ratios that have a bound, and that all sides drew the tokens that they should."""
    listed = []
    for peer, value in figures["ratios"].items():
        if (bound := BOUNDS.get((name, peer))) is not None:
            suffix = "" if peer == "transformers" else f"_{peer}"
            listed.append(check(_named(name + suffix, dtype), value, ">=", bound))
    if "largest_gap" in figures:
        listed.append(check(_named(f"{name}_largest_gap", dtype), figures["largest_gap"], "<=", LARGEST_GAP[dtype]))
    listed.append(check(_named(f"{name}_tokens_missing", dtype), figures["tokens_missing"], "<=", 0))
    return listed


def _measure(sides: dict[str, Side], workload: Workload, repeats: int) -> dict[str, Any]:
    """Rates of every side, ratios of ours to each, and what the tokens say."""
    requests = workload.requests
    turns = {name: partial(side.run, requests) for name, side in sides.items()}
    peer = sides.get("transformers")
    if isinstance(peer, Transformers):
        peer.choose(requests[:BATCH])
        if len(requests) > BATCH:
            by_output = sorted(requests, key=lambda request: request[1])
            turns["transformers, sorted by output length"] = partial(peer.run, by_output)
    runs = in_turn(turns, repeats)
    rates = {name: [workload.rate(run) for run in listed] for name, listed in runs.items()}
    figures = {
        "tokens_per_second": {name: spread(values) for name, values in rates.items()},
        "ratios": {name: ratio(rates["refimpl"], values) for name, values in rates.items() if name != "refimpl"},
        "settings": {name: side.settings for name, side in sides.items()},
        "tokens_missing": _missing(requests, list(itertools.chain(*runs.values()))),
    }
    if isinstance(peer, Transformers):
        figures |= _compare(peer, requests, {name: runs[name][-1].token_ids for name in sides})
    return figures


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
