"""What the engine costs beside the model: the share of a step's time outside its forward pass, and what the host does.

The forward pass is all that the model computes, from token ids to logits. Everything else counts as the engine's: planning,
preparing the batch, the sampler, taking tokens in, text, events. For 256 sequences, where the model here would take seconds,
a stand-in reads real text aloud in place of model and sampler, so that a step is what the host does and nothing else.
Prompts are pieces of real text too: after made-up ids a model is sure of nothing, and sampling has far more to look through.
"""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections.abc import Callable
from importlib.resources import files
from typing import Any

import msgspec
import torch
from torch import Tensor

from refimpl.bench.result import Result, check, setting, workload_hash
from refimpl.config import EngineArgs
from refimpl.engine import Engine
from refimpl.errors import ConfigError
from refimpl.executor.local import LocalExecutor
from refimpl.executor.model_runner import ModelRunner
from refimpl.loading.checkpoint import open_checkpoint
from refimpl.sampling_params import SamplingParams

PROMPT = 37
STRIDE = 31
"""Tokens of the text from where one sequence begins to where the next one does."""
WARM_UP = 5
KINDS = {
    "greedy": SamplingParams(temperature=0, ignore_eos=True, output_kind="delta"),
    "sampled": SamplingParams(temperature=0.8, top_p=0.95, seed=1, ignore_eos=True, output_kind="delta"),
}


def run(engine_options: dict[str, Any], sequences: int = 16, many: int = 256, steps: int = 60) -> Result:
    """Measure ``steps`` decode steps of ``sequences`` requests, greedy and sampled, and of ``many`` without a model."""
    if min(sequences, many, steps) < 1:
        raise ConfigError(f"sequences, many and steps must be 1 or more; they are {sequences}, {many} and {steps}")
    checkpoint = open_checkpoint(engine_options["model"])
    shares = _shares(engine_options, sequences, steps)
    host = _host(engine_options, many, steps)
    return Result(
        topic="overhead",
        setting=setting(
            checkpoint,
            dtype=engine_options["dtype"],
            workload=f"{sequences} sequences decode for {steps} steps, greedy and at T = 0.8, top-p 0.95; {many} without a "
            "model",
            workload_hash=workload_hash(
                {"sequences": sequences, "many": many, "steps": steps, "prompt": PROMPT, "stride": STRIDE}
            ),
            tokens_produced=(len(KINDS) * sequences + many) * (steps + WARM_UP + 1),
        ),
        results=shares | {"host_ms": host, "sequences": sequences, "many": many},
        checks=[
            check(f"engine_share_{sequences}", shares["greedy"]["engine_share"], "<=", 0.05),
            check(f"engine_share_{sequences}_sampled", shares["sampled"]["engine_share"], "<=", 0.12),
            check(f"host_ms_{many}", host["median"], "<=", 3.0),
        ],
    )


class _Clock:
    """Wraps methods, and sums the seconds that they take."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """The method, timed."""

        def wrapped(*arguments: Any) -> Any:
            started = time.perf_counter()
            value = method(*arguments)
            self.seconds += time.perf_counter() - started
            return value

        return wrapped

    def take(self) -> float:
        """The seconds since the last call."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds


def _make_engine(engine_options: dict[str, Any], sequences: int, tokens: int) -> tuple[Engine, ModelRunner]:
    """An engine with a slot for each sequence, that computes in this thread, and what runs its steps."""
    longest = PROMPT + tokens + 1
    fixed = {
        "max_num_seqs": sequences,
        "max_model_len": longest,
        "max_num_batched_tokens": sequences * PROMPT,
        "enable_prefix_caching": False,
        "async_scheduling": False,
    }
    engine = Engine(EngineArgs.from_options(engine_options | fixed))
    executor = engine.executor
    if not isinstance(executor, LocalExecutor):
        engine.close()
        raise ConfigError("the overhead of a step is measured in one process; leave tensor_parallel_size out")
    return engine, executor.runner


def _real_text(engine: Engine) -> list[int]:
    """The prompts of the parity workload that are plain text, one after the other."""
    lines = files("refimpl").joinpath("bench/workloads/parity-20.jsonl").read_text(encoding="utf-8").splitlines()
    return engine.tokenizer.encode(" ".join(json.loads(line).get("prompt") or "" for line in lines))


def _fill(engine: Engine, sequences: int, tokens: int, params: SamplingParams) -> None:
    """Give the engine its sequences, and step until all decode."""
    text = _real_text(engine)
    for number in range(sequences):
        ids = [text[(STRIDE * number + place) % len(text)] for place in range(PROMPT)]
        engine.add_request(str(number), ids, msgspec.structs.replace(params, max_tokens=tokens))
    while len(engine.scheduler.waiting):
        engine.step()
    for _ in range(WARM_UP):
        engine.step()


def _shares(engine_options: dict[str, Any], sequences: int, steps: int) -> dict[str, Any]:
    """Seconds of a step and of its forward pass, greedy and sampled in turn."""
    tokens = steps + WARM_UP + 1
    engine, runner = _make_engine(engine_options, sequences, tokens)
    clock = _Clock()
    runner.model.forward = clock.timed(runner.model.forward)  # type: ignore[method-assign]
    runner.model.compute_logits = clock.timed(runner.model.compute_logits)  # type: ignore[method-assign]
    figures: dict[str, Any] = {}
    for kind, params in KINDS.items():
        _fill(engine, sequences, tokens, params)
        whole, model = [], []
        beyond, sorted_whole = runner.sampler.num_rows_beyond_head, runner.sampler.num_rows_sorted
        for _ in range(steps):
            clock.take()
            started = time.perf_counter()
            engine.step()
            whole.append(time.perf_counter() - started)
            model.append(clock.take())
        figures[kind] = {
            "ms_per_step": 1e3 * statistics.median(whole),
            "forward_ms": 1e3 * statistics.median(model),
            # Of each step, so that a slow moment of the machine slows both parts of the quotient.
            "engine_share": statistics.median((a - b) / a for a, b in zip(whole, model, strict=True)),
            # Rows for which the head of the ranking did not do, and those whose whole vocabulary was sorted at last.
            "beyond_head_share": (runner.sampler.num_rows_beyond_head - beyond) / (sequences * steps),
            "sorted_rows_share": (runner.sampler.num_rows_sorted - sorted_whole) / (sequences * steps),
        }
        engine.abort([str(number) for number in range(sequences)])
    engine.close()
    return figures


class _Reader(torch.nn.Module):
    """Stands in for the model: hidden states that nobody looks at."""

    def forward(self, input_ids: Tensor, *_: Any) -> Tensor:
        """Nothing, in the shape of something."""
        return input_ids


def _host(engine_options: dict[str, Any], sequences: int, steps: int) -> dict[str, float]:
    """Milliseconds of a step whose model and sampler cost nothing, its tokens being those of real text."""
    tokens = steps + WARM_UP + 1
    engine, runner = _make_engine(engine_options, sequences, tokens)
    ids = torch.tensor(_real_text(engine))
    place = itertools.count()
    loaded, runner.model = runner.model, _Reader()  # type: ignore[assignment]
    offsets = STRIDE * torch.arange(sequences)
    runner._draw = lambda hidden, inputs, *_: ids[(offsets[: len(inputs.drawing)] + next(place)) % len(ids)]  # type: ignore[method-assign]
    _fill(engine, sequences, tokens, KINDS["greedy"])
    milliseconds = []
    for _ in range(steps):
        started = time.perf_counter()
        engine.step()
        milliseconds.append(1e3 * (time.perf_counter() - started))
    runner.model = loaded
    engine.close()
    return {"median": statistics.median(milliseconds), "min": min(milliseconds), "max": max(milliseconds)}
