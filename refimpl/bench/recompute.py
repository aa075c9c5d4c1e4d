"""What the KV cache is for: decode steps with it, beside steps that recompute every key and value of the context.

By the formula, a step without a cache computes n tokens where one with it computes 1: the linear layers cost n times as
much, and attention n²/2 products instead of n.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

from refimpl.bench.flops import flop_counter
from refimpl.bench.result import Result, check, setting, workload_hash
from refimpl.config import EngineArgs, ModelConfig
from refimpl.engine import Engine
from refimpl.errors import ConfigError
from refimpl.loading.checkpoint import open_checkpoint
from refimpl.sampling_params import SamplingParams

SIDES = {"cached": True, "recomputed": False}


def run(engine_options: dict[str, Any], context: int = 504, steps: int = 8, repeats: int = 5) -> Result:
    """Measure the ``steps`` steps of one request that follow ``context`` tokens; both sides in turn, ``repeats`` times."""
    if min(context, steps, repeats) < 1:
        raise ConfigError(f"context, steps and repeats must be 1 or more; they are {context}, {steps} and {repeats}")
    longest = context + steps + 1
    fixed = {"max_num_seqs": 1, "async_scheduling": False, "max_model_len": longest + 1, "num_gpu_blocks_override": None}
    budget = max(longest, engine_options.get("max_num_batched_tokens") or 0)
    options = engine_options | fixed | {"max_num_batched_tokens": budget}
    prompt = [100 + 7 * i % 150 for i in range(context)]
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    flops, tokens = {}, {}
    engines = {
        side: Engine(EngineArgs.from_options(options | {"enable_kv_cache": enabled})) for side, enabled in SIDES.items()
    }
    for side, engine in engines.items():
        flops[side], tokens[side] = _count(engine, prompt, steps)
    for _ in range(repeats):
        for side, engine in engines.items():
            seconds[side] += _time(engine, prompt, steps)
    for engine in engines.values():
        engine.close()
    medians = {side: statistics.median(values) for side, values in seconds.items()}
    flops_ratio = flops["recomputed"] / flops["cached"]
    time_ratio = medians["recomputed"] / medians["cached"]
    checkpoint = open_checkpoint(options["model"])
    formula = {side: _formula(checkpoint.config, context, steps, cached) for side, cached in SIDES.items()}
    return Result(
        topic="recompute",
        setting=setting(
            checkpoint,
            dtype=options["dtype"],
            workload=f"one request, greedy, steps {context + 1} to {context + steps}",
            workload_hash=workload_hash({"prompt": prompt, "steps": steps}),
            tokens_produced=steps * (2 * repeats + 2),
            repeats=repeats,
        ),
        results={
            side: {
                "flops_per_step": flops[side] / steps,
                "flops_per_step_by_formula": formula[side] / steps,
                "seconds_per_step_median": medians[side],
                "seconds_per_step_min": min(seconds[side]),
                "seconds_per_step_max": max(seconds[side]),
                "token_ids": tokens[side],
            }
            for side in SIDES
        }
        | {"flops_ratio": flops_ratio, "time_ratio": time_ratio},
        checks=[
            # Tiles of queries compute a little more than the causal half of the scores.
            check("recompute_flops_over_formula", max(flops[s] / formula[s] for s in SIDES), "<=", 1.15),
            check("recompute_flops_ratio", flops_ratio, ">=", 300),
            check("recompute_time_ratio", time_ratio, ">=", 5),
            check("recompute_same_tokens", float(tokens["cached"] == tokens["recomputed"]), ">=", 1),
        ],
    )


def _formula(config: ModelConfig, context: int, steps: int, cached: bool) -> int:
    """FLOPs of the measured steps: 2 a weight and token, 4 · heads · D a query and visible key, the head once a step."""
    head = config.vocab_size * config.hidden_size
    layers = config.num_parameters - config.num_outside_matrices
    scores = 4 * config.num_hidden_layers * config.num_attention_heads * config.head_dim
    total = 0
    for length in range(context + 1, context + steps + 1):
        tokens, visible = (1, length) if cached else (length, length * (length + 1) // 2)
        total += 2 * (tokens * layers + head) + scores * visible
    return total


def _start(engine: Engine, prompt: list[int], steps: int) -> None:
    """Queue the request and compute its prompt: what follows are the steps to measure."""
    params = SamplingParams(temperature=0, max_tokens=steps + 1, ignore_eos=True)
    engine.add_request("0", prompt, params)
    engine.step()


def _count(engine: Engine, prompt: list[int], steps: int) -> tuple[int, list[int]]:
    """FLOPs of all measured steps, and the tokens that they drew."""
    _start(engine, prompt, steps)
    with flop_counter() as counter:
        for _ in range(steps):
            [output] = engine.step()
    return counter.get_total_flops(), output.outputs[0].token_ids[1:]


def _time(engine: Engine, prompt: list[int], steps: int) -> list[float]:
    """Seconds of each measured step. The prompt's step before them is the warm-up."""
    _start(engine, prompt, steps)
    seconds = []
    for _ in range(steps):
        started = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - started)
    return seconds
