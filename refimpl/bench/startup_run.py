"""One start of an engine, timed from within: ``python -m refimpl.bench.startup_run OPTIONS``, a JSON object.

It has ``engine_options``, ``model_config`` (or null) and ``started``, the time of the day at which the process was ordered.
What is printed is a line of phases in seconds, behind :data:`MARK`.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

MARK = "refimpl-startup "
PROMPT = 512
"""Tokens of the first request's prompt, or as many as fit."""
WEIGHTS = "loading the weights"


def main(asked: dict[str, Any]) -> None:
    """Start, serve one request, then some of other kinds, and tell what it took."""
    from refimpl.bench.compilations import counted

    with counted() as compilations:
        told = _timed(asked["engine_options"], asked["model_config"], asked["started"])
        at_first = compilations.compiled
        engine = told.pop("engine")
        told |= {
            "compiled": compilations.compiled,
            "found_in_the_cache": compilations.found,
            "compile_seconds": dict(sorted(compilations.seconds.items(), key=lambda item: -item[1])),
        }
        _serve_others(engine)
        told["compiled_by_other_requests"] = compilations.compiled - at_first
        engine.close()
    print(MARK + json.dumps(told), flush=True)  # noqa: T201 - this is the protocol


def _timed(engine_options: dict[str, Any], model_config: str | None, started: float) -> dict[str, Any]:
    """Phases until the first token is there, and the engine."""
    import torch

    from refimpl.bench.subject import model_or_shape
    from refimpl.config import EngineArgs
    from refimpl.engine import Engine

    engine_options, _ = model_or_shape(engine_options, model_config)
    on_gpu = torch.cuda.is_available()
    phases = {"python and imports": time.time() - started}
    begun = time.perf_counter()
    if on_gpu:
        torch.cuda.init()
        phases["the GPU's driver"] = time.perf_counter() - begun
    making = time.perf_counter()
    engine = Engine(EngineArgs.from_options(engine_options))
    made = time.perf_counter() - making
    stages = dict(engine.executor.stages.seconds)  # type: ignore[attr-defined]  # the local executor has them
    phases |= stages | {"tokenizer, scheduler and the rest": made - sum(stages.values())}
    phases["first token"] = _serve(engine, "first")
    total = sum(phases.values())
    before = sum(seconds for name, seconds in phases.items() if name in ("python and imports", "the GPU's driver", WEIGHTS))
    return {
        "engine": engine,
        "phases": phases,
        "total": total,
        "first_token_after_weights": total - before,
        "second_request": _serve(engine, "second"),
        "tokens_produced": 2,
    }


def _serve(engine: Any, request_id: str, output: int = 1, **sampling: Any) -> float:
    """Seconds of one request that is served alone."""
    from refimpl.sampling_params import SamplingParams

    begun = time.perf_counter()
    length = min(PROMPT, engine.scheduler.config.max_model_len - output)
    params = SamplingParams(**({"temperature": 0} | sampling), max_tokens=output, ignore_eos=True, detokenize=False)
    vocab_size = engine.model_config.vocab_size
    first = sum(map(ord, request_id))  # another for each, so that no prefix is found
    engine.add_request(request_id, [(first + place) % vocab_size for place in range(length)], params)
    while engine.has_unfinished_requests():
        engine.step()
    return time.perf_counter() - begun


def _serve_others(engine: Any) -> None:
    """Requests that ask for kernels which greedy decoding does not: each would make its user wait for a compiler."""
    for name, sampling in (
        ("drawn", {"temperature": 1.0}),
        ("cut", {"temperature": 1.0, "top_p": 0.9, "top_k": 50}),
        ("penalised", {"presence_penalty": 0.5}),
        ("logprobs", {"logprobs": 2}),
    ):
        _serve(engine, name, 3, **sampling)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
