"""The time to the first token of a long prompt, computed in one chunk, beside other engines on this machine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from refimpl.bench.peers import Transformers, open_sides, refuse_random_weights
from refimpl.bench.result import Result, check, setting, workload_hash
from refimpl.bench.rows import Figures, Rows
from refimpl.bench.sides import Requests, Side, in_turn, ratio, same_length, spread, tell_sides
from refimpl.errors import ConfigError
from refimpl.loading.checkpoint import open_checkpoint

PROMPTS = (37, 1000)


def run(
    engine_options: dict[str, Any],
    repeats: int = 5,
    dtypes: Sequence[str] = ("bfloat16", "float32"),
    compare: bool = True,
    compare_python: Path | None = None,
    prompts: Sequence[int] = PROMPTS,
    max_minutes: float | None = None,
) -> Result:
    """Measure one request at a time, one token out, for each length in ``prompts`` and each dtype, sides in turn.

    With ``max_minutes`` a row has the fewer repeats, and those that no time is left for say so.
    """
    refuse_random_weights(engine_options)
    if min(repeats, *prompts) < 1:
        raise ConfigError(f"repeats is {repeats} and the prompts {prompts}; all must be 1 or more")
    checkpoint = open_checkpoint(engine_options["model"])
    vocab_size, longest = checkpoint.config.vocab_size, max(prompts) + 8
    names = {(dtype, length): _named(length, dtype) for dtype in dtypes for length in prompts}
    rows = Rows(list(names.values()), partial(tell_sides, of="seconds", unit="ms", factor=1e3), max_minutes)
    checks = []
    with rows.kept_when_interrupted():
        for dtype in dtypes:
            with open_sides(engine_options, checkpoint, dtype, 1, longest, compare, compare_python) as sides:
                for length in prompts:
                    name, requests = names[dtype, length], same_length(1, length, 1, vocab_size)
                    figures = rows.measure(name, partial(_measure, sides, requests, repeats))
                    # A short prompt is a step like a decode, which throughput judges.
                    if figures and length >= PROMPTS[-1] and "transformers" in figures["ratios"]:
                        checks.append(check(name, figures["ratios"]["transformers"], "<=", 1.05))
    return Result(
        topic="latency",
        setting=setting(
            checkpoint,
            dtype=" and ".join(dtypes),
            workload=f"one request of {' or '.join(f'{length:,}' for length in prompts)} tokens, one token out",
            workload_hash=workload_hash([same_length(1, length, 1, vocab_size) for length in prompts]),
            tokens_produced=sum(row["repeats"] + 1 for row in rows.measured().values()),
            repeats=repeats,
        ),
        results=rows.all(),
        checks=checks,
    )


def _named(length: int, dtype: str) -> str:
    return f"ttft_{length}" if dtype == "bfloat16" else f"ttft_{length}_{dtype}"


def _measure(sides: dict[str, Side], requests: Requests, repeats: int, at_most: float) -> Figures:
    until = time.perf_counter() + at_most
    for side in sides.values():
        if isinstance(side, Transformers):
            side.choose(requests)
    runs = in_turn({name: partial(side.run, requests) for name, side in sides.items()}, repeats, until)
    seconds = {name: [run.total for run in listed] for name, listed in runs.items()}
    return {
        "seconds": {name: spread(values) for name, values in seconds.items()},
        "ratios": {name: ratio(seconds["refimpl"], values) for name, values in seconds.items() if name != "refimpl"},
        "repeats": len(runs["refimpl"]),
        "settings": {name: side.settings for name, side in sides.items()},
    }
