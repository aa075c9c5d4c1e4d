"""What the simulator and ``refimpl bench serve-sim`` are held against: vLLM 0.23.0 on one H200, measured on 2026-11-30.

Settings: random weights, greedy sampling, 16,384 batched tokens, 1,024 sequences, blocks of 16, asynchronous scheduling, no
prefix caching, answers of given lengths. ``decode-N`` is N prompts of 512 tokens and 256 output tokens each, ``prefill-N``
the same with one, ``mixed-N`` N requests of 64 to 1,024 and 16 to 512, all at once; ``poisson-R`` are such requests, R a
second for 20 seconds. Seconds are medians of 2 to 5 runs of the whole set; the Poisson sets ran once.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from refimpl.bench.arrivals import arrival_times
from refimpl.simulate import TraceRequest

SEED = 20_240_611
BATCHED_TOKENS, SEQUENCES = 16_384, 1_024
PROMPT, OUTPUT, SECONDS = 512, 256, 20.0


@dataclass(frozen=True)
class Run:
    """A set that was measured as a whole."""

    model: str
    dtype: str
    blocks: int
    """Of its KV cache, as vLLM found them."""
    workload: str
    seconds: float
    fitted: bool = False
    """Whether the simulator's shares and overheads were chosen by it."""


@dataclass(frozen=True)
class PoissonRun:
    """A set with arrivals. Seconds; of each figure the 50th, 90th and 99th percentile over the requests."""

    rate: int
    requests: int
    output_tokens_per_second: float
    ttft: tuple[float, float, float]
    tpot: tuple[float, float, float]
    widest_gap: tuple[float, float, float]


RUNS = (
    Run("llama-3-8b", "bfloat16", 57_167, "prefill-1", 0.016),
    Run("llama-3-8b", "bfloat16", 57_167, "prefill-64", 0.760, fitted=True),
    Run("llama-3-8b", "bfloat16", 57_167, "prefill-256", 3.079, fitted=True),
    Run("llama-3-8b", "bfloat16", 57_167, "decode-1", 1.25, fitted=True),
    Run("llama-3-8b", "bfloat16", 57_167, "decode-8", 1.41, fitted=True),
    Run("llama-3-8b", "bfloat16", 57_167, "decode-16", 1.56, fitted=True),
    Run("llama-3-8b", "bfloat16", 57_167, "decode-32", 1.89, fitted=True),
    Run("llama-3-8b", "bfloat16", 57_167, "decode-64", 2.48, fitted=True),
    Run("llama-3-8b", "bfloat16", 57_167, "decode-128", 3.85, fitted=True),
    Run("llama-3-8b", "bfloat16", 57_167, "decode-256", 6.85, fitted=True),
    Run("llama-3-8b", "bfloat16", 57_167, "mixed-128", 5.20),
    Run("llama-3-8b", "bfloat16", 57_167, "mixed-512", 14.78),
    Run("llama-3-8b", "fp8", 60_149, "prefill-64", 0.498, fitted=True),
    Run("llama-3-8b", "fp8", 60_149, "decode-1", 0.91),
    Run("llama-3-8b", "fp8", 60_149, "decode-64", 1.84),
    Run("llama-3-8b", "fp8", 60_149, "mixed-128", 4.05),
    Run("llama-3-8b", "fp8", 60_149, "mixed-512", 11.79),
    Run("llama-3-70b", "fp8", 11_478, "prefill-64", 4.479),
    Run("llama-3-70b", "fp8", 11_478, "decode-1", 5.36, fitted=True),
    Run("llama-3-70b", "fp8", 11_478, "decode-64", 11.34),
    Run("llama-3-70b", "fp8", 11_478, "mixed-128", 24.69),
)
POISSON_RUNS = (
    PoissonRun(10, 196, 2385, (26.05e-3, 34.06e-3, 52.14e-3), (6.21e-3, 6.60e-3, 7.55e-3), (25.15e-3, 28.53e-3, 30.55e-3)),
    PoissonRun(20, 389, 4572, (29.78e-3, 45.45e-3, 74.13e-3), (7.82e-3, 8.53e-3, 9.82e-3), (30.33e-3, 41.61e-3, 41.61e-3)),
    PoissonRun(
        30, 580, 6734, (41.65e-3, 68.08e-3, 90.93e-3), (11.89e-3, 14.41e-3, 17.01e-3), (43.87e-3, 57.09e-3, 57.09e-3)
    ),
)
"""Of Llama-3-8B in bfloat16, as the first runs; the engine was stepped in a loop, requests being added between steps."""


def requests(workload: str) -> list[TraceRequest]:
    """The requests of a set, as they were measured."""
    kind, _, number = workload.partition("-")
    if kind == "poisson":
        return _poisson(float(number))
    if kind == "mixed":
        return [_mixed(i) for i in range(int(number))]
    return [TraceRequest(0.0, PROMPT, OUTPUT if kind == "decode" else 1)] * int(number)


def _mixed(index: int, arrival: float = 0.0) -> TraceRequest:
    rng = random.Random(SEED * 1_000_003 + index)  # noqa: S311 - a workload, no secret
    return TraceRequest(arrival, rng.randint(64, 1024), rng.randint(16, 512))


def _poisson(rate: float) -> list[TraceRequest]:
    return [_mixed(index, at) for index, at in enumerate(arrival_times(rate, SECONDS, SEED))]
