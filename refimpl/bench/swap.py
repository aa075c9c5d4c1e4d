"""Swapping beside recomputing: what a preemption costs either way, by length, and what the others feel of it.

A preemption takes two steps: one in which the victim gives way, and one in which it comes back, with its blocks moved or its
tokens computed again. What it costs is the time of these two beyond one step as it would have been. Where the engine plans
a step ahead, as on a GPU, they are seen a call of ``Engine.step`` later.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from refimpl.bench.result import Check, Result, check, setting, workload_hash
from refimpl.bench.sides import prompt, spread
from refimpl.bench.subject import model_or_shape
from refimpl.config import EngineArgs
from refimpl.engine import Engine
from refimpl.errors import ConfigError, RefimplError
from refimpl.events import EventLog
from refimpl.sampling_params import SamplingParams

MODES = ("swap", "recompute")
STEADY = 3
"""Steps before each preemption, whose median is a step as it would have been."""
VICTIM = "victim"


def run(
    engine_options: dict[str, Any],
    lengths: tuple[int, ...] = (64, 128, 256, 512, 1024),
    others: int = 8,
    repeats: int = 5,
    timeline: Path | None = None,
    model_config: str | None = None,
) -> Result:
    """Preempt a request of each length ``repeats`` times both ways; one of the longest also beside ``others``.

    ``timeline`` is where the event log of its swaps beside the others is written, for widgets. ``model_config`` names a
    shape (llama-3-8b, or a folder with a config.json) that is run with random weights, in place of the options' model.
    """
    if not lengths or min(*lengths, others, repeats) < 1 or list(lengths) != sorted(set(lengths)):
        raise ConfigError(
            f"lengths, others and repeats must be 1 or more, and lengths must rise; they are {lengths}, {others}, {repeats}"
        )
    engine_options, checkpoint = model_or_shape(engine_options, model_config)
    engine = _engine(engine_options, max(lengths), others, repeats)
    costs = engine.scheduler.costs
    assert costs is not None, "there is a swap space, and the mode is auto"
    vocab_size = checkpoint.config.vocab_size
    rows = [_alone(engine, prompt(length, 0, vocab_size), repeats) for length in lengths]
    for row in rows:
        row |= {
            "swap_predicted": costs.swap_seconds(row["tokens"]),
            "recompute_predicted": costs.recompute_seconds(row["tokens"]),
        }
    beside = {}
    for mode in MODES:
        with _keeping(engine, timeline if mode == "swap" else None):
            beside[mode] = _beside(engine, mode, max(lengths), vocab_size, others, repeats)
    engine.close()
    return Result(
        topic="swap",
        setting=setting(
            checkpoint,
            dtype=engine_options["dtype"],
            workload=f"one request of {lengths[0]:,} to {lengths[-1]:,} tokens; the longest beside {others} that decode",
            workload_hash=workload_hash({"lengths": lengths, "others": others, "steady": STEADY}),
            tokens_produced=sum(row["tokens_produced"] for row in rows) + sum(b["tokens_produced"] for b in beside.values()),
            repeats=repeats,
        ),
        results={
            "lengths": rows,
            "link_bytes_per_second": costs.link_bytes_per_second,
            "flops_per_second": costs.flops_per_second,
            "crossover_predicted": costs.crossover,
            "crossover_measured": crossover([(r["tokens"], *(r[mode]["median"] for mode in MODES)) for r in rows]),
            "beside": beside,
            "others": others,
        },
        checks=_checks(rows, beside["swap"], random_weights=model_config is not None),
    )


def _checks(rows: list[dict[str, Any]], beside: dict[str, Any], random_weights: bool) -> list[Check]:
    same = {mode: all(row["same_tokens"][mode] for row in rows) for mode in MODES}
    checks = [check("swap_same_tokens", float(same["swap"]), ">=", 1)]
    if not random_weights:  # whose logits are too close: computed at once, keys and values are rounded in another order
        checks.append(check("recompute_same_tokens", float(same["recompute"]), ">=", 1))
    return [
        *checks,
        check("cheaper_mode_predicted", statistics.mean(map(_foreseen, rows)), ">=", 0.8),
        check("itl_during_swap", beside["ratio"]["median"], "<=", 1.1),
    ]


def _engine(engine_options: dict[str, Any], longest: int, others: int, repeats: int) -> Engine:
    """With room for all of it, on the device and on the host; nothing is ever preempted unless it is asked for."""
    output = _output(repeats)
    block_size = EngineArgs.from_options(engine_options).block_size
    prompts = [longest, *(_short(number) for number in range(others))]
    fixed = {
        "max_num_seqs": others + 1,
        "max_model_len": longest + output,
        "max_num_batched_tokens": sum(prompts) + others,  # all begin in one step
        "num_gpu_blocks_override": sum(2 + (length + output) // block_size for length in prompts),
        "enable_prefix_caching": False,  # else recomputing finds its own blocks
        "preemption_mode": "auto",
        "swap_space": max(engine_options.get("swap_space") or 0, 0.5),
        "event_log_size": 0,
    }
    return Engine(EngineArgs.from_options(engine_options | fixed))


def _output(repeats: int) -> int:
    """Tokens of an answer: enough for a first preemption that warms up and ``repeats`` more."""
    return 2 + (repeats + 1) * (STEADY + 3) + 2


def _short(number: int) -> int:
    """Tokens of another request's prompt."""
    return 8 + number


@contextmanager
def _keeping(engine: Engine, path: Path | None) -> Iterator[None]:
    """Write down what happens meanwhile; in memory until it is over, so that no step waits for a file."""
    if path is None:
        yield
        return
    log = EventLog(engine.events.header, 1_000_000)
    stop = engine.events.subscribe(log.append)
    yield
    stop()
    try:
        log.save(path)
    except OSError as error:
        raise RefimplError(f"{path} cannot be written: {error}") from error


# ---------------------------------------------------------------------- one request


def _alone(engine: Engine, token_ids: list[int], repeats: int) -> dict[str, Any]:
    """Seconds of preemptions of a request that is alone, and whether its tokens are those of an undisturbed one."""
    undisturbed, _ = _answer(engine, token_ids, None, repeats)
    row: dict[str, Any] = {
        # Computed when it is preempted for the middle time: it grows a little from one to the next.
        "tokens": len(token_ids) + STEADY + (STEADY + 1 + _ahead(engine)) * (repeats + 1) // 2,
        "same_tokens": {},
        "tokens_produced": len(undisturbed) * (1 + len(MODES)),
    }
    for mode in MODES:
        tokens, seconds = _answer(engine, token_ids, mode, repeats)
        row["same_tokens"][mode] = tokens == undisturbed
        row[mode] = spread(seconds)
    return row


def _answer(engine: Engine, token_ids: list[int], mode: str | None, repeats: int) -> tuple[list[int], list[float]]:
    """The tokens of an answer that is preempted again and again, and what each time cost; the first one warms up."""
    answered: list[int] = []
    seconds = []
    _add(engine, VICTIM, token_ids, _output(repeats))
    _step(engine)
    for _ in range(repeats + 1):
        step = statistics.median(_step(engine)[0] for _ in range(STEADY))
        if mode is not None:
            engine.scheduler.preempt_at(engine.scheduler.step, VICTIM, mode)
        seconds.append(max(0.0, _two_steps(engine, step) - step))
    while engine.has_unfinished_requests():
        answered = _step(engine)[1].get(VICTIM, answered)
    return answered, seconds[1:]


def crossover(measured: list[tuple[int, float, float]]) -> float | None:
    """Where swapping becomes the cheaper, between two lengths on a straight line; each is (tokens, swap, recompute).

    0 if it is the cheaper at all lengths, None if it is not at the longest.
    """
    gains = [(tokens, recompute - swap) for tokens, swap, recompute in measured]
    if gains[-1][1] <= 0:
        return None
    for (a, before), (b, after) in reversed(list(pairwise(gains))):
        if before <= 0:
            return a + (b - a) * -before / (after - before)
    return 0.0


def _foreseen(row: dict[str, Any]) -> bool:
    """Whether the mode that costs less is the one that "auto" takes."""
    measured = row["swap"]["median"] < row["recompute"]["median"]
    return bool(measured == (row["swap_predicted"] < row["recompute_predicted"]))


# ---------------------------------------------------------------------- the others


def _beside(engine: Engine, mode: str, length: int, vocab_size: int, others: int, repeats: int) -> dict[str, Any]:
    """What others that decode wait for a token while a victim goes and comes, over what they wait without.

    Of its two steps one has a row less than those before it, and the other as many.
    """
    most = _output(repeats)
    for number in range(others):
        _add(engine, str(number), prompt(_short(number), 1 + number, vocab_size), most)
    _add(engine, VICTIM, prompt(length, 0, vocab_size), most)
    _step(engine)
    during, without = [], []
    for _ in range(repeats + 1):
        without.append(statistics.median(_step(engine)[0] for _ in range(STEADY)))
        engine.scheduler.preempt_at(engine.scheduler.step, VICTIM, mode)
        during.append(_two_steps(engine, without[-1]) / 2)
    produced = (others + 1) * most
    while engine.has_unfinished_requests():
        _step(engine)
    pairs = list(zip(during, without, strict=True))[1:]  # the first warms up
    return {
        "itl_during": spread([d for d, _ in pairs]),
        "itl_without": spread([w for _, w in pairs]),
        "ratio": spread([d / w for d, w in pairs]),
        "tokens_produced": produced,
    }


def _add(engine: Engine, request_id: str, token_ids: list[int], most: int) -> None:
    engine.add_request(request_id, token_ids, SamplingParams(temperature=0, max_tokens=most, ignore_eos=True))


def _ahead(engine: Engine) -> int:
    """Steps that are planned before the last one's tokens are known."""
    return int(engine.events.header.config["async_scheduling"])


def _two_steps(engine: Engine, step: float) -> float:
    """Seconds of the next two steps to be planned; those before them in the queue take ``step`` each."""
    ahead = _ahead(engine)
    return sum(_step(engine)[0] for _ in range(2 + ahead)) - ahead * step


def _step(engine: Engine) -> tuple[float, dict[str, list[int]]]:
    """Seconds of a step, and the tokens so far of the requests that got one."""
    started = time.perf_counter()
    outputs = engine.step()
    seconds = time.perf_counter() - started
    return seconds, {output.request_id: output.outputs[0].token_ids for output in outputs}
