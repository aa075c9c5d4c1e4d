"""Output tokens a second of a model's shape: random weights, token ids in and out, all requests there at the beginning.

For GPUs, where a model's weights need not be at hand to know how fast it runs. Requests are greedy, their end-of-text token
is ignored, no two prompts begin alike, and no prefix is cached. Times include the engine's whole Python side, but no text.
``refimpl bench throughput --model-config NAME`` runs it; with ``--quantization fp8`` or ``awq`` by weights of 8 or 4 bits.

=========== ================================================================================
decode-N    N requests, 512 tokens in, 256 out
mixed-N     N requests of 64 to 1,024 tokens in, 16 to 512 out
saturated-N N requests, 1,000 tokens in, 1,000 out: as many as a deployment can hold, and more
=========== ================================================================================
"""

from __future__ import annotations

import random
import re
import statistics
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from refimpl.bench.result import Check, Result, check, setting, workload_hash
from refimpl.bench.rows import Figures, Rows
from refimpl.bench.sides import Requests, in_turn, serve
from refimpl.bench.subject import model_or_shape
from refimpl.config import EngineArgs
from refimpl.engine import Engine
from refimpl.errors import ConfigError

SEED = 20240611
WORKLOADS = ("decode-1", "decode-64", "mixed-128", "mixed-512")
LENGTHS = {"decode": (512, 256), "saturated": (1_000, 1_000)}
"""Tokens in and out of each request, where all have the same."""
LOWEST_ID, HIGHEST_ID = 1_000, 100_000
BF16_ON_H200 = {"llama-3-8b": {"decode-1": 220.0, "decode-64": 6680.0, "mixed-128": 6720.0, "mixed-512": 9280.0}}
"""Output tokens a second that weights in bfloat16 must bring on one H200, by shape. vLLM 0.23.0 has 204, 6,678, 6,716 and
9,276 by its defaults (FlashAttention-3, torch.compile, CUDA graphs, 16,384 batched tokens, 1,024 sequences; measured on
2026-11-29); reading the weights alone would allow 305 of a single request."""
FP8_ON_H200 = {
    "llama-3-8b": {"decode-1": 311.0, "decode-64": 8890.0, "mixed-512": 11_630.0},
    "llama-3-70b": {"decode-1": 52.0, "decode-64": 1445.0, "mixed-128": 1413.0},
}
"""Output tokens a second that FP8 weights must bring on one H200, by shape. vLLM 0.23.0 has 283, 8,888 and 11,627 of the
first, 48, 1,445 and 1,413 of the second (FP8 weights, activations scaled by token, CUTLASS); for a single request the bound
is 1.1 times that, which is 80% of what reading the weights alone would allow."""
STEP_ON_H200: dict[tuple[str, str | None], dict[str, float]] = {("llama-3-70b", "awq"): {"decode-1": 0.012}}
"""Seconds that a step may take, by shape and weights: reading 38 GB of 4-bit weights at 4.3 TB/s takes 9 ms."""


def requests_of(name: str, scale: float = 1.0) -> Requests:
    """The requests of a workload, the same in every run; ``scale`` shrinks their lengths.

    Raises:
        ConfigError: it is not decode-N, mixed-N or saturated-N.

    """
    kind, _, count = name.partition("-")
    if kind not in ("mixed", *LENGTHS) or not count.isdecimal() or not int(count):
        raise ConfigError(
            f"workload is {name!r}; it must be decode-N, mixed-N or saturated-N with a number of requests, as decode-64"
        )
    requests = [_request(index, LENGTHS.get(kind)) for index in range(int(count))]
    return [(prompt[: max(1, round(len(prompt) * scale))], max(1, round(output * scale))) for prompt, output in requests]


def within_vocabulary(requests: Requests, vocab_size: int) -> Requests:
    """The same with ids that a smaller vocabulary has."""
    return [([token_id % vocab_size for token_id in prompt], output) for prompt, output in requests]


def _request(index: int, lengths: tuple[int, int] | None) -> tuple[list[int], int]:
    drawn = random.Random(SEED * 1_000_003 + index)  # noqa: S311 - a workload, no secret
    mixed = drawn.randint(64, 1024), drawn.randint(16, 512)
    prompt, output = lengths or mixed
    return [drawn.randint(LOWEST_ID, HIGHEST_ID) for _ in range(prompt)], output


def run(
    engine_options: dict[str, Any],
    model_config: str,
    workloads: Sequence[str] = WORKLOADS,
    repeats: int = 5,
    scale: float = 1.0,
    max_minutes: float | None = None,
) -> Result:
    """Measure each workload ``repeats`` times after one that warms up.

    Args:
        engine_options: of the engine; its model and load format are the shape's.
        model_config: a shape by name (llama-3-8b, llama-3-70b), or a folder with a config.json.
        workloads: by name.
        repeats: 1 or more.
        scale: of the lengths, at most 1.
        max_minutes: for everything; repeats become fewer then, and what no time is left for says so.

    With ``quantization``, and on several ranks, the topic is one of its own, by shape, method and their number, so that all
    results can be kept.

    Raises:
        ConfigError: a name or number is out of range.

    """
    if repeats < 1 or not 0 < scale <= 1:
        raise ConfigError(f"repeats is {repeats}, scale {scale}; they must be 1 or more, and over 0 to 1")
    options, shape = model_or_shape(engine_options, model_config)
    listed = {name: requests_of(name, scale) for name in workloads}
    rows = Rows(list(listed), _tell, max_minutes)
    engine = Engine(EngineArgs.from_options(options | {"enable_prefix_caching": False, "event_log_size": 0}))
    try:
        with rows.kept_when_interrupted():
            for name, requests in listed.items():
                rows.measure(name, partial(_measure, engine, within_vocabulary(requests, shape.config.vocab_size), repeats))
    finally:
        engine.close()
    quantization, dtype = engine_options.get("quantization"), engine_options["dtype"]
    size = engine_options.get("tensor_parallel_size", 1)
    return Result(
        topic=topic_of(model_config, quantization, size),
        setting=setting(
            model=model_config,
            model_hash=shape.fingerprint(),
            dtype=dtype if quantization is None else f"{dtype} with {quantization} weights",
            workload=f"{', '.join(workloads)}: greedy, ids in and out, no prefix cache, random weights",
            workload_hash=workload_hash(listed),
            tokens_produced=sum(row["output_tokens"] * (len(row["seconds"]) + 1) for row in rows.measured().values()),
            repeats=repeats,
            tensor_parallel_size=size,
        ),
        results=rows.all(),
        checks=checks_of(model_config, quantization, rows.measured()) if scale == 1 and size == 1 else [],
    )


def topic_of(model_config: str, quantization: str | None, tensor_parallel_size: int = 1) -> str:
    """Under which name a result is kept."""
    how = [quantization] if quantization else []
    how += [f"tp{tensor_parallel_size}"] if tensor_parallel_size > 1 else []
    if not how:
        return "offline"
    return re.sub(r"[^a-z0-9]+", "_", "_".join(["offline", Path(model_config).name, *how]).lower())


def _tell(figures: Figures) -> str:
    return f"{figures['output_tokens_per_second']:,.1f} output tokens/s"


def _measure(engine: Engine, requests: Requests, repeats: int, seconds: float) -> Figures:
    """The seconds from the first request's arrival until the last token is there, of each repeat."""
    until = time.perf_counter() + seconds
    runs = in_turn({"refimpl": partial(serve, engine, requests, detokenize=False)}, repeats, until)["refimpl"]
    tokens = sum(output for _, output in requests)
    assert all(sum(map(len, run.token_ids)) == tokens for run in runs), "greedy, without an end"
    totals = [run.total for run in runs]
    return {
        "requests": len(requests),
        "prompt_tokens": sum(len(prompt) for prompt, _ in requests),
        "output_tokens": tokens,
        "seconds": totals,
        "output_tokens_per_second": tokens / statistics.median(totals),
        "median_step": statistics.median(step for run in runs for step in run.steps),
    }


def checks_of(model_config: str, quantization: str | None, results: dict[str, Any]) -> list[Check]:
    """Against vLLM's figures, where they were measured of the same."""
    if not torch.cuda.is_available() or "H200" not in torch.cuda.get_device_name():
        return []
    of_shape = f"{model_config.rpartition('-')[2]}{'' if quantization is None else f'_{quantization}'}"
    rates, steps = bounds_of(model_config, quantization), STEP_ON_H200.get((model_config, quantization), {})
    named = {name: f"{name.replace('-', '')}_{of_shape}" for name in results}
    return [
        *(
            check(named[name], results[name]["output_tokens_per_second"], ">=", rates[name])
            for name in rates
            if name in results
        ),
        *(
            check(f"{named[name]}_step", results[name]["median_step"], "<=", steps[name])
            for name in steps
            if name in results
        ),
    ]


def bounds_of(model_config: str, quantization: str | None) -> dict[str, float]:
    """The least output tokens a second on one H200, by workload; none for what nobody else was measured with."""
    by_method = {None: BF16_ON_H200, "fp8": FP8_ON_H200}
    return by_method.get(quantization, {}).get(model_config, {})
