"""What continuous batching is for: short and long answers mixed, served in static batches and continuously.

A static batch lasts as long as its longest answer, so a step of it is as good as ``mean / longest`` of its rows. Where every
batch has a long answer, continuous batching gains at most ``longest / mean``.
"""

from __future__ import annotations

import random
import statistics
import time
from typing import Any

from tqdm import tqdm

from refimpl.bench.model_free import run_model_free
from refimpl.bench.result import Result, check, setting, workload_hash
from refimpl.config import EngineArgs
from refimpl.engine import Engine
from refimpl.errors import ConfigError
from refimpl.loading.checkpoint import open_checkpoint
from refimpl.sampling_params import SamplingParams

REQUESTS, BATCH = 240, 16
SHORT, LONG, PROMPT = 50, 2_000, 64
SHARES = (1 / 3, 1 / 2, 2 / 3, 9 / 10)
"""Shares of short answers in the table."""
SIDES: dict[str, dict[str, Any]] = {
    "static": {"scheduler": "static", "static_drop_finished": False},
    "static, finished rows dropped": {"scheduler": "static", "static_drop_finished": True},
    "continuous": {"scheduler": "continuous", "static_drop_finished": False},
}
TURN = 20
"""Steps of a side before the next one has its turn, so that whatever else the machine does falls on all alike."""


def run(engine_options: dict[str, Any], scale: int = 10, requests: int = REQUESTS, share: float = 2 / 3) -> Result:
    """Serve the mix with all lengths divided by ``scale``; count the steps of other mixes at full length, without a model.

    Raises:
        ConfigError: the scale leaves nothing of the short answers, or a number is out of range.

    """
    if not 1 <= scale <= SHORT or requests < 1 or not 0 <= share <= 1:
        raise ConfigError(
            f"scale is {scale}, requests {requests}, share {share}; they must be 1 to {SHORT}, 1 or more, and 0 to 1"
        )
    lengths = [(PROMPT // scale or 1, answer // scale) for answer in answers(requests, share)]
    seconds = _serve(engine_options, lengths)
    produced = sum(answer for _, answer in lengths)
    figures = {
        side: {
            "seconds": sum(steps),
            "steps": len(steps),
            "tokens_per_second": produced / sum(steps),
            "seconds_per_step_median": statistics.median(steps),
        }
        for side, steps in seconds.items()
    }
    speedup = figures["static"]["seconds"] / figures["continuous"]["seconds"]
    checkpoint = open_checkpoint(engine_options["model"])
    return Result(
        topic="batching",
        setting=setting(
            checkpoint,
            dtype=engine_options["dtype"],
            workload=f"{requests} requests, {share:.0%} of {SHORT // scale} and the rest of {LONG // scale} output tokens, "
            f"prompts of {PROMPT // scale or 1}, batches of {BATCH}, shuffled",
            workload_hash=workload_hash(lengths),
            tokens_produced=len(SIDES) * produced,
        ),
        results={
            "sides": figures,
            "speedup": speedup,
            "ceiling": ceiling(lengths),
            "by_share": [_count_steps(share) for share in SHARES],
        },
        checks=[
            check("continuous_over_static", speedup, ">=", 2.0),
            check("continuous_over_static_at_most", speedup, "<=", 1.1 * ceiling(lengths)),
        ],
    )


def answers(requests: int, share: float) -> list[int]:
    """Output lengths in tokens, shuffled: ``share`` of them short, the others long."""
    short = round(requests * share)
    listed = [SHORT] * short + [LONG] * (requests - short)
    random.Random(0).shuffle(listed)  # noqa: S311 - a workload, no secret
    return listed


def ceiling(lengths: list[tuple[int, int]]) -> float:
    """Longest over mean answer: what continuous batching gains if each batch has a longest one."""
    return max(answer for _, answer in lengths) / statistics.mean(answer for _, answer in lengths)


def _serve(engine_options: dict[str, Any], lengths: list[tuple[int, int]]) -> dict[str, list[float]]:
    """Seconds of each step, by side. The one with the most tokens left has its turn, so all end at about the same time."""
    longest = max(prompt + answer for prompt, answer in lengths)
    fixed = {"max_num_seqs": BATCH, "max_model_len": longest, "enable_prefix_caching": False, "async_scheduling": False}
    fixed |= {"event_log_size": 10}
    engines = {side: Engine(EngineArgs.from_options(engine_options | fixed | own)) for side, own in SIDES.items()}
    for engine in engines.values():
        engine.add_request("warm-up", [1], SamplingParams(max_tokens=2, ignore_eos=True))
        while engine.has_unfinished_requests():
            engine.step()
        for number, (prompt, answer) in enumerate(lengths):
            params = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True, output_kind="final_only")
            engine.add_request(str(number), [100 + number % 100] * prompt, params)
    seconds: dict[str, list[float]] = {side: [] for side in engines}
    left = {side: sum(answer for _, answer in lengths) for side in engines}
    with tqdm(total=sum(left.values()), desc="batching", unit="token", leave=False) as bar:
        while any(left.values()):
            side = max(left, key=left.__getitem__)
            for _ in range(TURN):
                if left[side]:
                    started = time.perf_counter()
                    engines[side].step()
                    seconds[side].append(time.perf_counter() - started)
                    drawn = sum(token >= 0 for token in engines[side].events.records[-1].token_ids)
                    left[side] -= drawn
                    bar.update(drawn)
    for engine in engines.values():
        engine.close()
    return seconds


def _count_steps(share: float) -> dict[str, float]:
    """Steps of the mix at full length, without a model. On hardware whose step costs the same, they are time."""
    lengths = [(PROMPT, answer) for answer in answers(REQUESTS, share)]
    steps = {}
    for side in ("static", "continuous"):
        args = EngineArgs(max_num_seqs=BATCH, max_model_len=PROMPT + LONG, enable_prefix_caching=False, **SIDES[side])
        blocks = BATCH * -(-(PROMPT + LONG) // args.block_size)
        steps[side] = run_model_free(args, blocks, lengths, lambda scheduler, planned: None).step
    return {
        "share_of_short": share,
        "static_steps": steps["static"],
        "continuous_steps": steps["continuous"],
        "ratio": steps["static"] / steps["continuous"],
        "ceiling": ceiling(lengths),
    }
