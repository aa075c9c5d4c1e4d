"""Beams beside independent copies: the blocks that they take, the blocks that are copied, and the time of a step.

The sides are one search, one greedy request, and as many separate samples as the search has beams. In each step a block in
use counts once (physical), and once for each table that it is in (logical): so many would copies take that share nothing.
The prompts are pieces of a long one of the parity workload.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

from refimpl.beam_params import BeamSearchParams
from refimpl.bench.result import Result, check, setting, workload_hash
from refimpl.bench.sides import ratio, spread
from refimpl.config import EngineArgs
from refimpl.engine import Engine
from refimpl.errors import ConfigError
from refimpl.loading.checkpoint import open_checkpoint
from refimpl.sampling_params import SamplingParams
from refimpl.tokenizer.tokenizer import Tokenizer


@dataclass
class Watched:
    """What was seen of requests that ran together, step by step."""

    physical: list[int] = field(default_factory=list)
    """Blocks in use after each step."""
    logical: list[int] = field(default_factory=list)
    """Entries of all block tables after each step."""
    copies: int = 0
    seconds: list[float] = field(default_factory=list)
    """Of each step that computed no prompt."""

    @property
    def share(self) -> float:
        """Physical blocks over logical ones, summed over the steps."""
        return sum(self.physical) / sum(self.logical)

    @property
    def step(self) -> float:
        """Seconds of a step, in the middle."""
        return statistics.median(self.seconds)


def run(engine_options: dict[str, Any], width: int = 4, prompt: int = 64, output: int = 256, repeats: int = 3) -> Result:
    """Search ``repeats`` prompts of one text, in turn with a greedy request and with ``width`` separate samples."""
    if min(width, prompt, repeats) < 1 or output < 2:
        raise ConfigError(
            f"width, prompt and repeats must be 1 or more, and output 2 or more; they are {width}, {prompt}, {repeats} and "
            f"{output}"
        )
    checkpoint = open_checkpoint(engine_options["model"])
    prompts = _prompts(checkpoint.tokenizer(), prompt, repeats + 1)
    engine = _engine(engine_options, width, prompt + output)
    sides: dict[str, list[Watched]] = {"beam": [], "greedy": [], "samples": []}
    for token_ids in prompts:  # the first one warms up
        sides["beam"].append(_watch(engine, [(token_ids, _search(width, output))]))
        sides["greedy"].append(_watch(engine, [(token_ids, _drawing(output, 0, 0))]))
        sides["samples"].append(_watch(engine, [(token_ids, _drawing(output, 1, seed)) for seed in range(width)]))
    unshared = width * -(-(prompt + output) // engine.args.block_size)
    engine.close()
    results = _figures({name: runs[1:] for name, runs in sides.items()}) | {"width": width, "unshared_blocks": unshared}
    return Result(
        topic="beam",
        setting=setting(
            checkpoint,
            dtype=engine_options["dtype"],
            workload=f"{width} beams, prompts of {prompt} tokens, {output} output tokens",
            workload_hash=workload_hash({"prompts": prompts, "width": width, "output": output}),
            tokens_produced=len(prompts) * (2 * width + 1) * output,
            repeats=repeats,
        ),
        results=results,
        checks=[
            check("beam_physical_share", results["physical_share"], "<=", 0.45),
            check("separate_physical_share", results["separate_physical_share"], ">=", 1),
        ],
    )


def _figures(sides: dict[str, list[Watched]]) -> dict[str, Any]:
    searches = sides["beam"]
    steps = {name: [watched.step for watched in runs] for name, runs in sides.items()}
    return {
        "physical_share": sum(sum(s.physical) for s in searches) / sum(sum(s.logical) for s in searches),
        "physical_share_of_each": [s.share for s in searches],
        "separate_physical_share": min(s.share for s in sides["samples"]),
        "most_blocks": max(max(s.physical) for s in searches),
        "copied_blocks": [s.copies for s in searches],
        "steps": [len(s.physical) for s in searches],
        "seconds_per_step": {name: spread(seconds) for name, seconds in steps.items()},
        "step_over_greedy": ratio(steps["beam"], steps["greedy"]),
        "step_over_samples": ratio(steps["beam"], steps["samples"]),
    }


def _engine(engine_options: dict[str, Any], width: int, longest: int) -> Engine:
    """With room for copies that share nothing; cached prefixes would let separate samples share."""
    block_size = EngineArgs.from_options(engine_options).block_size
    fixed = {
        "max_num_seqs": width,
        "max_model_len": longest,
        "num_gpu_blocks_override": width * (-(-longest // block_size) + 1),
        "enable_prefix_caching": False,
    }
    return Engine(EngineArgs.from_options(engine_options | fixed))


def _prompts(tokenizer: Tokenizer, length: int, count: int) -> list[list[int]]:
    """Pieces of one English text, one behind the other."""
    lines = files("refimpl").joinpath("bench/workloads/parity-20.jsonl").read_text(encoding="utf-8").splitlines()
    text = next(item["prompt"] for item in map(json.loads, lines) if item["name"] == "raw-long")
    token_ids = tokenizer.encode(text)
    if len(token_ids) < length * count:
        raise ConfigError(
            f"{count} prompts of {length} tokens are asked for (repeats, and one that warms up), but the text has "
            f"{len(token_ids)} tokens; ask for fewer or shorter ones"
        )
    return [token_ids[i * length : (i + 1) * length] for i in range(count)]


def _search(width: int, output: int) -> BeamSearchParams:
    return BeamSearchParams(beam_width=width, max_tokens=output, ignore_eos=True)


def _drawing(output: int, temperature: float, seed: int) -> SamplingParams:
    return SamplingParams(temperature=temperature, seed=seed, max_tokens=output, ignore_eos=True, output_kind="final_only")


def _watch(engine: Engine, requests: Sequence[tuple[list[int], SamplingParams | BeamSearchParams]]) -> Watched:
    """Run requests that are all there at once. The tables are looked at between the steps, which are timed."""
    seen = Watched()
    for number, (token_ids, params) in enumerate(requests):
        engine.add_request(str(number), token_ids, params)
    while engine.has_unfinished_requests():
        started = time.perf_counter()
        engine.step()
        seconds = time.perf_counter() - started
        record = engine.events.records[-1]
        seen.copies += len(record.copies)
        if set(record.num_new_tokens) == {1}:
            seen.seconds.append(seconds)
        tables = [engine.scheduler.kv.table(sequence.sequence_id) for sequence in engine.scheduler.running]
        if tables:
            seen.logical.append(sum(map(len, tables)))
            seen.physical.append(len(set().union(*tables)))
    return seen
