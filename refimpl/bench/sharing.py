"""What sharing blocks saves: samples of one prompt, and a second prompt that begins like the first."""

from __future__ import annotations

import statistics
from typing import Any

from refimpl.bench.result import Result, check, setting, workload_hash
from refimpl.config import EngineArgs
from refimpl.engine import Engine
from refimpl.loading.checkpoint import open_checkpoint
from refimpl.outputs import RequestOutput
from refimpl.sampling_params import SamplingParams

SAMPLES = 4
PROMPT = 1_000
PREFIX = 1_500
OWN = 50


def run(engine_options: dict[str, Any], repeats: int = 5) -> Result:
    """Blocks of ``n = 4`` samples over 1,000 tokens; tokens computed and time to the first one behind a cached prefix."""
    options = engine_options | {"max_model_len": 2_000, "enable_prefix_caching": True, "num_gpu_blocks_override": 400}
    engine = Engine(EngineArgs.from_options(options))
    shared, own, copies = _samples(engine)
    cold, warm, computed = _prefix(engine, repeats)
    engine.close()
    checkpoint = open_checkpoint(options["model"])
    ratio = statistics.median(cold) / statistics.median(warm)
    return Result(
        topic="sharing",
        setting=setting(
            checkpoint,
            dtype=options["dtype"],
            workload=f"n = {SAMPLES} over {PROMPT} tokens; {PREFIX} shared tokens and {OWN} of its own",
            workload_hash=workload_hash({"prompt": _prompt(PROMPT, 0), "prefix": _prompt(PREFIX, 1)}),
            tokens_produced=3 * SAMPLES + 2 * repeats,
            repeats=repeats,
        ),
        results={
            "shared_blocks": shared,
            "own_blocks": own,
            "copied_blocks": copies,
            "unshared_blocks": SAMPLES * -(-(PROMPT + 1) // engine.args.block_size),
            "computed_tokens": computed,
            "prompt_tokens": PREFIX + OWN,
            "ttft_cold_seconds": cold,
            "ttft_cached_seconds": warm,
            "ttft_ratio": ratio,
        },
        checks=[
            check("shared_blocks", shared, ">=", PROMPT // engine.args.block_size),
            check("own_blocks", own, "<=", SAMPLES),
            check("prefix_computed_tokens", computed, "<=", 62),
            check("prefix_ttft_ratio", ratio, ">=", 5),
        ],
    )


def _prompt(length: int, salt: int) -> list[int]:
    return [100 + (7 * i + 131 * salt) % 151 for i in range(length)]


def _samples(engine: Engine) -> tuple[int, int, int]:
    """Blocks that all samples share after their first divergent token, blocks of one alone, and blocks copied."""
    params = SamplingParams(n=SAMPLES, temperature=1, seed=1, max_tokens=3, ignore_eos=True)
    engine.add_request("samples", _prompt(PROMPT, 0), params)
    copies = 0
    while len(engine.scheduler.running) < SAMPLES or not copies:
        engine.step()
        copies += len(engine.events.records[-1].copies)
    tables = [set(engine.scheduler.kv.table(sequence.sequence_id)) for sequence in engine.scheduler.running]
    while engine.has_unfinished_requests():
        engine.step()
    shared = set.intersection(*tables)
    return len(shared), len(set.union(*tables) - shared), copies


def _prefix(engine: Engine, repeats: int) -> tuple[list[float], list[float], int]:
    """Seconds to the first token without and with the prefix cached, in turn; and the tokens computed with it."""
    cold, warm, computed = [], [], 0
    for repeat in range(repeats):
        engine.reset_prefix_cache()
        first, _ = _first_token(engine, _prompt(PREFIX, 1) + _prompt(OWN, 2 + 2 * repeat))
        second, computed = _first_token(engine, _prompt(PREFIX, 1) + _prompt(OWN, 3 + 2 * repeat))
        cold.append(first)
        warm.append(second)
    return cold, warm, computed


def _first_token(engine: Engine, prompt: list[int]) -> tuple[float, int]:
    """Seconds from arrival to the only token, and the tokens that were computed for it."""
    engine.add_request("one", prompt, SamplingParams(temperature=0, max_tokens=1))
    outputs: list[RequestOutput] = []
    computed = 0
    while engine.has_unfinished_requests():
        outputs += engine.step()
        computed += sum(engine.events.records[-1].num_new_tokens)
    seconds = outputs[-1].metrics.time_to_first_token
    assert seconds is not None
    return seconds, computed
