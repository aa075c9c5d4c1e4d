"""Speculative decoding beside none: what it brings, beside what the law predicts of it.

Of a model, greedy and one request at a time:

==========  ==========================================================================================
ngram       prompts of about 380 tokens that ask for a text again: repeat this, rename in this code
drafter     the head that comes with refimpl for this model, on the prompts of the parity workload
==========  ==========================================================================================

Of a shape with random weights (``model_config``), where each draft is accepted with a given probability, at temperature 1:

============  ========================================================================================
draft_8b      one request, a draft model of Llama-3-8B's shape in 16 bits
draft_1b      the same with Llama-3.2-1B's
adaptive_8b   batches, at two rates of acceptance, where the number of drafts adapts
adaptive_1b   the same
============  ========================================================================================

A model is held against an engine without speculation, which answers in turn with it; a shape, of which there is room for one
alone, against the same engine that drafts nothing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from itertools import pairwise
from typing import Any

from refimpl.bench.model_clock import models_timed
from refimpl.bench.result import Check, Result, check, setting, workload_hash
from refimpl.bench.rounds import ADAPTIVE, LEAST_SHARE, answer, climb, costs_of, runner_of
from refimpl.bench.rows import DoesNotFit, Figures, Rows, chosen
from refimpl.bench.sides import Requests, same_length
from refimpl.config import EngineArgs
from refimpl.engine import Engine
from refimpl.errors import ConfigError
from refimpl.loading.checkpoint import open_checkpoint
from refimpl.loading.dummy import ShapeCheckpoint
from refimpl.simulate.models import find_model
from refimpl.speculative.head_files import shipped_head
from refimpl.speculative.law import tokens_a_round
from refimpl.speculative.lengths import FixedLength, ladder

OF_A_MODEL = ("ngram", "drafter")
DRAFTS = {"8b": "llama-3-8b", "1b": "llama-3.2-1b"}
OF_A_SHAPE = ("draft_1b", "adaptive_1b", "draft_8b", "adaptive_8b")
LEAST = {"ngram": 1.5, "drafter": 1.2, "draft_8b": 1.5, "draft_1b": 2.2}
"""Times as fast as without speculation."""
NEVER_UNDER = 0.97
"""Of no speculation, by the largest batch where the number of drafts adapts."""
MOST_OVERHEAD = 0.05
"""Of a round: sampling and bookkeeping."""
MOST_OFF = 0.2
"""How far the batch from which nothing pays may be from where it is as measured."""
RATES = (0.4, 0.75)
MOST_DRAFTS = 8
OUTPUT, SHAPE_PROMPT, SHAPE_OUTPUT = 128, 128, 128


@dataclass(frozen=True)
class Chance:
    """What is measured of a shape, whose drafts are accepted by chance."""

    acceptance: float
    """Of the draft rows."""
    rates: tuple[float, ...] = RATES
    """Of the adaptive rows."""
    batch_sizes: tuple[int, ...] = (64,)
    """Of the adaptive rows."""
    most_drafts: int = MOST_DRAFTS


def copying_prompts() -> list[dict[str, str]]:
    """The prompts of ``ngram``: their task, repeat or rename, and what a user says."""
    text = files("refimpl").joinpath("bench/workloads/copying.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def run(
    engine_options: dict[str, Any],
    model_config: str | None = None,
    rows: Sequence[str] | None = None,
    repeats: int = 3,
    batch_sizes: Sequence[int] = (64,),
    acceptance: float = 0.75,
    scale: float = 1.0,
    max_minutes: float | None = None,
    rates: Sequence[float] = RATES,
    most_drafts: int = MOST_DRAFTS,
) -> Result:
    """Measure the rows of a model, or of a shape.

    Args:
        engine_options: of the engine; lengths and prefix cache are the benchmark's, and so is speculation.
        model_config: a shape by name, or a folder with a config.json; None measures the options' model.
        rows: by name; None is all that there are.
        repeats: times that every number of drafts is measured, in turn.
        batch_sizes: of the adaptive rows, rising. With several, every number of drafts is measured at each.
        acceptance: of each draft of the draft rows.
        scale: of output lengths, at most 1.
        max_minutes: for everything; what there is no time left for says so.
        rates: of acceptance, for the adaptive rows.
        most_drafts: of a round, for the rows of a shape.

    Raises:
        ConfigError: a name or number is out of range.

    """
    outside = [rate for rate in (acceptance, *rates) if not 0 <= rate <= 1]
    if repeats < 1 or not 0 < scale <= 1 or outside or not rates or min(batch_sizes, default=0) < 1:
        raise ConfigError(
            f"repeats is {repeats}, scale {scale}, acceptance {acceptance}, rates {list(rates)}, batch_sizes "
            f"{list(batch_sizes)}; they must be 1 or more, over 0 to 1, 0 to 1, 0 to 1 each, and 1 or more each"
        )
    if engine_options.get("speculative_config") is not None:
        raise ConfigError("speculative_config is the benchmark's own; leave it out, or see refimpl speculate profile")
    if model_config is None:
        return _of_a_model(engine_options, rows, repeats, scale, max_minutes)
    chance = Chance(acceptance, tuple(rates), tuple(batch_sizes), most_drafts)
    return _of_a_shape(engine_options, model_config, rows, repeats, chance, scale, max_minutes)


def _of_a_model(
    engine_options: dict[str, Any], rows: Sequence[str] | None, repeats: int, scale: float, max_minutes: float | None
) -> Result:
    checkpoint = open_checkpoint(engine_options.get("model", EngineArgs.model))
    has_head = shipped_head(checkpoint.fingerprint()) is not None
    names = chosen(rows, OF_A_MODEL) if rows or has_head else ["ngram"]
    measured = Rows(names, _tell, max_minutes)
    output = max(8, round(OUTPUT * scale))
    fixed = {"max_num_seqs": 1, "max_model_len": 1024, "enable_prefix_caching": False, "event_log_size": 0}
    plain = Engine(EngineArgs.from_options(engine_options | fixed))
    encode = plain.tokenizer.apply_chat_template
    workloads = {
        "ngram": [(encode([{"role": "user", "content": one["prompt"]}]), output) for one in copying_prompts()],
        "drafter": [(encode(chat), output) for chat in _chats()],
    }

    def row(name: str, seconds: float) -> Figures:
        if name == "drafter" and not has_head:
            raise DoesNotFit(f"no head comes with refimpl for {checkpoint.name}")
        config = {"method": "head" if name == "drafter" else "ngram", "num_speculative_tokens": MOST_DRAFTS}
        engine = Engine(EngineArgs.from_options(engine_options | fixed | {"speculative_config": config}))
        try:
            return climb(engine, workloads[name], 1, ladder(MOST_DRAFTS), repeats, plain=plain, seconds=seconds)
        finally:
            engine.close()

    try:
        with measured.kept_when_interrupted():
            for name in names:
                measured.measure(name, partial(row, name))
    finally:
        plain.close()
    return Result(
        topic="speculation",
        setting=setting(
            checkpoint,
            dtype=engine_options.get("dtype", EngineArgs.dtype),
            workload=f"one request at a time, {output} tokens out, greedy; held against an engine without speculation",
            workload_hash=workload_hash(workloads),
            repeats=repeats,
        ),
        results=measured.all(),
        checks=[one for name, figures in measured.measured().items() for one in _checks(name, figures)],
    )


def _chats() -> list[Any]:
    text = files("refimpl").joinpath("bench/workloads/parity-20.jsonl").read_text(encoding="utf-8")
    return [one["messages"] for one in map(json.loads, text.splitlines()) if "messages" in one]


def _of_a_shape(
    engine_options: dict[str, Any],
    model_config: str,
    rows: Sequence[str] | None,
    repeats: int,
    chance: Chance,
    scale: float,
    max_minutes: float | None,
) -> Result:
    if engine_options.get("model", EngineArgs.model) != EngineArgs.model:
        raise ConfigError(f"model is {engine_options['model']!r} and model_config {model_config!r}; give one of them")
    shape = ShapeCheckpoint(model_config, find_model(model_config))
    names = chosen(rows, OF_A_SHAPE)
    measured = Rows(names, _tell, max_minutes)
    output = max(8, round(SHAPE_OUTPUT * scale))
    vocab_size, most = shape.config.vocab_size, max(chance.batch_sizes)
    alone, together = (same_length(count, SHAPE_PROMPT, output, vocab_size) for count in (1, most))
    fixed = {
        "model": shape,
        "load_format": "dummy",
        "max_num_seqs": most,
        "max_model_len": SHAPE_PROMPT + output + 4 * chance.most_drafts,
        "max_num_batched_tokens": most * (SHAPE_PROMPT + 1),
        "enable_prefix_caching": False,
        "event_log_size": 0,
    }
    with measured.kept_when_interrupted():
        for draft in [draft for draft in DRAFTS if any(name.endswith(draft) for name in names)]:
            engine = Engine(EngineArgs.from_options(engine_options | fixed | drafting(DRAFTS[draft], chance)))
            try:
                if f"draft_{draft}" in names:
                    measured.measure(f"draft_{draft}", partial(_alone, engine, alone, chance, repeats))
                if f"adaptive_{draft}" in names:
                    measured.measure(f"adaptive_{draft}", partial(_adaptive, engine, together, chance, repeats))
            finally:
                engine.close()
    return Result(
        topic="speculation_shape" if len(chance.batch_sizes) == 1 else "speculation_crossing",
        setting=setting(
            model=model_config,
            model_hash=shape.fingerprint(),
            dtype=engine_options.get("quantization") or engine_options.get("dtype", EngineArgs.dtype),
            workload=f"{SHAPE_PROMPT} tokens in and {output} out, temperature 1, random weights; SYNTHETIC ACCEPTANCE: each "
            "draft is accepted by chance, whatever the models say; held against the same engine drafting nothing",
            synthetic_acceptance=[chance.acceptance, *chance.rates],
            workload_hash=workload_hash([alone, together]),
            repeats=repeats,
        ),
        results=measured.all(),
        checks=[one for name, figures in measured.measured().items() for one in _checks(name, figures)],
    )


def drafting(draft: str, chance: Chance) -> dict[str, Any]:
    """Engine options of a draft model of a shape, whose drafts are accepted by chance."""
    model = ShapeCheckpoint(draft, find_model(draft))
    config = {"method": "draft_model", "model": model, "num_speculative_tokens": chance.most_drafts}
    return {"speculative_config": config | {"synthetic_acceptance": chance.acceptance}}


def _alone(engine: Engine, requests: Requests, chance: Chance, repeats: int, seconds: float) -> Figures:
    """One request at each number of drafts, and at the best what of a round is neither model."""
    runner = runner_of(engine)
    assert runner.speculation is not None
    runner.speculation.synthetic_acceptance = chance.acceptance
    figures = climb(engine, requests, 1, ladder(chance.most_drafts), repeats, temperature=1.0, seconds=seconds)
    with models_timed(runner) as clock:
        answered = answer(engine, requests, 1, FixedLength(figures["best"] or 1), temperature=1.0)
        models = clock.seconds()
    total = sum(one.total for one in answered.runs)
    return figures | {"synthetic_acceptance": chance.acceptance, "outside_models": max(0.0, 1 - models / total)}


def _adaptive(engine: Engine, requests: Requests, chance: Chance, repeats: int, seconds: float) -> Figures:
    """Batches at each rate of acceptance, where the number adapts; with several sizes, each number beside it."""
    runner = runner_of(engine)
    assert runner.speculation is not None
    sizes, numbers = chance.batch_sizes, ladder(chance.most_drafts) if len(chance.batch_sizes) > 1 else []
    climbing = partial(climb, engine, numbers=numbers, repeats=repeats, most=chance.most_drafts, temperature=1.0)
    each = seconds / (len(chance.rates) * len(sizes))
    found: Figures = {"synthetic_acceptance": list(chance.rates), "rates": {}}
    for rate in chance.rates:
        runner.speculation.synthetic_acceptance = rate
        by_size = {str(size): climbing(requests[:size], size, seconds=each) for size in sizes}
        found["rates"][f"{rate:g}"] = {"batches": by_size, "crossing": _crossing(engine, by_size, rate, numbers)}
    return found


def _crossing(engine: Engine, by_size: dict[str, Any], rate: float, numbers: list[int]) -> dict[str, float | None]:
    """From which batch on nothing pays: as the engine's costs say, and as measured, where both lie in what was measured."""
    costs, last = costs_of(engine), max(map(int, by_size))

    def pays(size: int) -> bool:
        gains = (tokens_a_round(rate, K) / costs.round_over_step(size, K) for K in numbers or [1])
        return max(gains) > 1

    chosen_at = next((float(size) for size in range(1, last + 1) if not pays(size)), None)
    points = []
    for size, figures in by_size.items():
        if gains := [rung["measured"] for name, rung in figures["rungs"].items() if name != ADAPTIVE]:
            points.append((int(size), max(gains)))
    measured = None
    for (low, above), (high, under) in pairwise(points):
        if measured is None and above >= 1 > under:
            measured = low + (high - low) * (above - 1) / (above - under)
    return {"chosen": chosen_at, "measured": measured}


def _checks(name: str, figures: Figures) -> list[Check]:
    if name.startswith("adaptive"):
        listed = []
        for rate, found in figures["rates"].items():
            percent = f"{float(rate):.0%}".rstrip("%")
            largest = found["batches"][max(found["batches"], key=int)]
            listed.append(check(f"{name}_{percent}", largest["rungs"][ADAPTIVE]["measured"], ">=", NEVER_UNDER))
            chosen_at, measured = found["crossing"]["chosen"], found["crossing"]["measured"]
            if chosen_at is not None and measured is not None:
                listed.append(check(f"{name}_{percent}_crossing_off", abs(chosen_at / measured - 1), "<=", MOST_OFF))
        return listed
    best = figures["rungs"][str(figures["best"] or 1)]
    listed = [check(name, max(best["measured"], figures["rungs"][ADAPTIVE]["measured"]), ">=", LEAST[name])]
    if name != "ngram":
        listed.append(check(f"{name}_of_prediction", best["measured"] / best["predicted"], ">=", LEAST_SHARE))
    if "outside_models" in figures:
        listed.append(check(f"{name}_outside_models", figures["outside_models"], "<=", MOST_OVERHEAD))
    return listed


def _tell(figures: Figures) -> str:
    if "rates" in figures:
        return ", ".join(
            f"at {rate} accepted {min(one['rungs'][ADAPTIVE]['measured'] for one in found['batches'].values()):.2f} times"
            for rate, found in figures["rates"].items()
        )
    told = [f"K = {name}: {rung['measured']:.2f} times" for name, rung in figures["rungs"].items()]
    return ", ".join(told)
