"""One model's shape on 1, 2, 4 and 8 GPUs: what each further one brings, and how far it is from what could be.

Each number of ranks and method of quantisation (as far as the weights fit) is measured in a process of its own with random
weights, by the workloads of :mod:`refimpl.bench.offline`. Beside the output tokens a second and the median time between two
tokens stand

==============  ======================================================================================================
efficiency      what a rank brings, over what it brings on the fewest ranks that were measured with this method
read floor      for a single request: the time in which a rank's weights can be read, over that of a step
all-reduces     of a step with so many rows, measured as ``refimpl bench all-reduce`` does: two a layer, and one more
predicted       by :mod:`refimpl.simulate`, with the same options and as many blocks in its cache
==============  ======================================================================================================

and some workloads again without CUDA graphs (eager), with the sums of ``all_reduce`` (one_shot, two_shot), and, on the most
ranks, with a draft model whose drafts are accepted by chance. Before all that, a small model of the same heads must say the
same greedy tokens on every number of ranks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any

from refimpl.bench import all_reduce
from refimpl.bench.offline import requests_of, within_vocabulary
from refimpl.bench.result import Check, Result, check, setting, workload_hash
from refimpl.bench.rows import DoesNotFit, Figures, Rows, chosen
from refimpl.bench.scaling_plan import (
    DEFAULT,
    DRAFT,
    METHODS,
    VARIANTS,
    WORKLOADS,
    Machine,
    Row,
    batch_of,
    efficiency,
    plan,
    predict,
    rows_of,
    share_of_floor,
    sums_in_a_step,
    why_not,
)
from refimpl.bench.scaling_process import MeasuringProcess
from refimpl.config import EngineArgs, ModelConfig
from refimpl.errors import ConfigError, RankFailedError, RefimplError
from refimpl.loading.dummy import ShapeCheckpoint
from refimpl.parallel.symmetric import WAYS
from refimpl.simulate.models import find_model

SIZES = {"max_num_seqs": 512, "max_num_batched_tokens": 16_384, "max_model_len": 2_048}
"""Of engines, where the options leave them as they are by default."""
LEAST_EFFICIENCY = 0.75
MOST_OFF = 0.15
"""How far from the prediction a measured rate may be, on the hardware that the simulator was fitted to."""
PUBLIC = {2: 5_165.0, 4: 8_911.0, 8: 13_181.0}
"""Output tokens a second of another engine, Llama-3-70B in FP8 on so many H200s, 1,000 tokens in and out: marks to compare
with, as they go about; how they were measured was not looked into."""


@dataclass(frozen=True)
class Asked:
    """What is to be measured."""

    ranks: Sequence[int] = (1, 2, 4, 8)
    methods: Sequence[str] = tuple(METHODS)
    workloads: Sequence[str] = WORKLOADS
    variants: Sequence[str] = tuple(VARIANTS)
    draft: str = "llama-3-8b"
    repeats: int = 2
    scale: float = 1.0
    """Of all lengths, at most 1."""
    same_tokens: bool = True
    """Whether tokens are compared over the ranks first."""

    def __post_init__(self) -> None:
        chosen(self.methods, tuple(METHODS))
        chosen(self.variants, tuple(VARIANTS))
        if not self.workloads or min(self.ranks, default=0) < 1 or self.repeats < 1 or not 0 < self.scale <= 1:
            raise ConfigError(
                f"ranks is {list(self.ranks)}, rows {list(self.workloads)}, repeats {self.repeats}, scale {self.scale}; "
                "they must be 1 or more each, one at least, 1 or more, and over 0 to 1"
            )


def run(
    engine_options: dict[str, Any],
    model_config: str = "llama-3-70b",
    asked: Asked | None = None,
    max_minutes: float | None = None,
) -> Result:
    """Measure every number of ranks that the model fits here.

    Args:
        engine_options: of the engine; ranks, quantisation, CUDA graphs, sums, drafts and the prefix cache are the
            benchmark's.
        model_config: a shape by name, or a folder with a config.json.
        asked: ranks, methods, workloads and variants.
        max_minutes: for everything; repeats become fewer then, and what no time is left for says so.

    Raises:
        ConfigError: a name or number is out of range, or no number of ranks fits.
        RefimplError: not even the device could be looked at.

    """
    asked = asked or Asked()
    listed = {name: requests_of(name, asked.scale) for name in asked.workloads}
    model = find_model(model_config)
    machine = _machine()
    deadline = math.inf if max_minutes is None else time.perf_counter() + 60 * max_minutes
    scaling = _Scaling(_with_sizes(engine_options, model), model_config, model, asked, machine, deadline)
    rows = Rows(scaling.names, _tell, max_minutes)
    with rows.kept_when_interrupted():
        scaling.measure_ranks(rows)
        scaling.measure_engines(rows)
    found = rows.all()
    return Result(
        topic="scaling",
        setting=setting(
            model=model_config,
            model_hash=ShapeCheckpoint(model_config, model).fingerprint(),
            dtype=f"{engine_options.get('dtype', EngineArgs.dtype)} with {', '.join(asked.methods)} weights",
            workload="all requests at once, ids in and out, greedy, no prefix cache, random weights; drafts by SYNTHETIC "
            "ACCEPTANCE at temperature 1",
            workload_hash=workload_hash(listed),
            tokens_produced=sum(row["output_tokens"] * len(row["seconds"]) for row in rows_of(rows.measured())),
            repeats=asked.repeats,
            scale=asked.scale,
        ),
        results=found | {"machine": vars(machine), "left_out": scaling.left_out},
        checks=checks_of(rows.measured(), machine.name, asked.scale),
    )


def _machine() -> Machine:
    with closing(MeasuringProcess()) as process:  # this process keeps off the GPUs, whose memory the engines want
        try:
            found: Machine = process.ask("look")
        except DoesNotFit as error:
            raise RefimplError(f"the device could not be looked at: {error}") from error
    return found


def _with_sizes(options: dict[str, Any], model: ModelConfig) -> dict[str, Any]:
    """The options, with sizes for these workloads where they are as by default."""
    sizes = SIZES | {"max_model_len": min(SIZES["max_model_len"], model.max_position_embeddings)}
    own = {name: size for name, size in sizes.items() if options.get(name) in (None, getattr(EngineArgs, name))}
    return options | own | {"enable_prefix_caching": False, "event_log_size": 0}


@dataclass
class _Scaling:
    """One run of the benchmark."""

    options: dict[str, Any]
    model_config: str
    model: ModelConfig
    asked: Asked
    machine: Machine
    deadline: float
    """Of ``time.perf_counter``: what a process still does then is cut off."""
    planned: list[Row] = field(init=False)
    ranks: list[int] = field(init=False)
    """Numbers that some method fits on."""
    left_out: dict[str, str] = field(init=False, default_factory=dict)
    """By number and method: why not."""
    _same: list[list[int]] | None = field(init=False, default=None)
    """Greedy tokens on the fewest ranks."""

    def __post_init__(self) -> None:
        fitting = []
        share = self.options.get("gpu_memory_utilization", EngineArgs.gpu_memory_utilization)
        for ranks in sorted(set(self.asked.ranks)):
            for method in chosen(self.asked.methods, tuple(METHODS)):
                if why := why_not(self.model, ranks, method, self.machine, share):
                    self.left_out[f"tp{ranks}-{method}"] = why
                else:
                    fitting.append((ranks, method))
        if not fitting:
            raise ConfigError(f"{self.model_config} fits no number of ranks here: {'; '.join(self.left_out.values())}")
        variants = chosen(self.asked.variants, tuple(VARIANTS))
        self.planned = plan(fitting, self.asked.workloads, variants, self.machine.gpus > 0)
        self.ranks = sorted({ranks for ranks, _ in fitting})

    @property
    def names(self) -> list[str]:
        """Of all rows, in their order."""
        same = [f"same-tokens-tp{n}" for n in self.ranks if self.asked.same_tokens]
        sums = [f"all-reduce-tp{n}" for n in self.ranks if n > 1]
        return [*same, *sums, *(row.name for row in self.planned)]

    def measure_ranks(self, rows: Rows) -> None:
        """What needs no engine of this shape: that tokens are the same, and how long the sums take."""
        for ranks in self.ranks if self.asked.same_tokens else ():
            rows.measure(f"same-tokens-tp{ranks}", partial(self._same_tokens, ranks))
        for ranks in self.ranks:
            if ranks > 1:
                rows.measure(f"all-reduce-tp{ranks}", partial(self._sums, ranks))

    def _left(self) -> float:
        return self.deadline - time.perf_counter()

    def _same_tokens(self, ranks: int, _seconds: float) -> Figures:
        with closing(MeasuringProcess()) as process:
            device = self.options.get("device", EngineArgs.device)
            found: list[list[int]] = process.ask("tokens", self.model, device, ranks, seconds=self._left())
        self._same = self._same or found
        pairs = [pair for ours, theirs in zip(found, self._same, strict=True) for pair in zip(ours, theirs, strict=True)]
        return {"tokens": len(pairs), "differing": sum(a != b for a, b in pairs)}

    def _sums(self, ranks: int, _seconds: float) -> Figures:
        batches = sorted({batch_of(workload) or 1 for workload in self.asked.workloads})
        count = sums_in_a_step(self.model)
        try:
            found = all_reduce.run(ranks, batches, self.model.hidden_size, count).results
        except RankFailedError as error:
            raise DoesNotFit(str(error)) from error
        return {"sums": count, "ways": found}

    def measure_engines(self, rows: Rows) -> None:
        """All engines; those of a number of ranks and a method in one process, one after the other."""
        for _, in_a_process in groupby(self.planned, key=lambda row: (row.ranks, row.method)):
            with closing(MeasuringProcess()) as process:
                for _, of_an_engine in groupby(in_a_process, key=lambda row: row.variant):
                    self._measure_engine(process, rows, of_an_engine)

    def _measure_engine(self, process: MeasuringProcess, rows: Rows, of_an_engine: Iterable[Row]) -> None:
        opened: Figures = {}

        def measure(row: Row, seconds: float) -> Figures:
            if "failed" in opened:
                raise DoesNotFit(opened["failed"])
            options = self._options_of(row)
            if not opened:
                draft = self.asked.draft if row.variant == DRAFT else None
                try:
                    opened.update(process.ask("open", options, self.model_config, draft, seconds=self._left()))
                except DoesNotFit as reason:
                    opened["failed"] = f"its engine did not start: {reason}"
                    raise
            predict = partial(self._predicted, row, options, opened["num_blocks"])
            predicted = None if self.machine.gpus else predict()  # a CPU's ranks want all of its cores
            process.order("measure", row.workload, self.asked.scale, self.asked.repeats, seconds)
            predicted = predict() if self.machine.gpus else predicted  # while the other process measures
            figures: Figures = vars(row) | {"start_seconds": opened["start_seconds"]} | process.answer(self._left())
            return figures | self._beside(row, figures, opened, predicted, rows.measured())

        for row in of_an_engine:
            rows.measure(row.name, partial(measure, row))

    def _options_of(self, row: Row) -> dict[str, Any]:
        """Of the engine that a row is measured on."""
        options = self.options | {
            "tensor_parallel_size": row.ranks,
            "quantization": None if row.method == "none" else row.method,
            "enforce_eager": row.variant == "eager",
            "all_reduce": row.variant if row.variant in WAYS else "auto",
        }
        if row.variant == DRAFT:  # what checks cost is measured at the start, up to this many rows
            most = max(batch_of(workload) or 1 for workload in VARIANTS[DRAFT] or ())
            options["max_num_seqs"] = min(options["max_num_seqs"], most)
        return options

    def _predicted(self, row: Row, options: dict[str, Any], num_blocks: int) -> Figures | None:
        if row.variant != DEFAULT or self.machine.hardware is None:
            return None
        own = {"tensor_parallel_size": 1, "quantization": None, "all_reduce": "auto"}  # the deployment's business there
        requests = within_vocabulary(requests_of(row.workload, self.asked.scale), self.model.vocab_size)
        return predict(options | own, self.model_config, self.machine.hardware, row, num_blocks, requests)

    def _beside(
        self, row: Row, figures: Figures, opened: Figures, predicted: Figures | None, measured: dict[str, Figures]
    ) -> Figures:
        """What a row's figures are held against."""
        rate: float = figures["output_tokens_per_second"]
        found: Figures = {}
        if row.variant != DRAFT:  # which runs on the most ranks alone
            fewest = next((n for n in self.ranks if row.beside(ranks=n) in measured), row.ranks)
            fewest_rate = measured.get(row.beside(ranks=fewest), figures)["output_tokens_per_second"]
            found["efficiency"] = {"of": fewest, "share": efficiency(rate, row.ranks, fewest_rate, fewest)}
        if row.variant == DEFAULT and row.workload == "decode-1":
            ceiling = self.machine.read_bytes_per_second
            found["share_of_floor"] = share_of_floor(opened["read_bytes"], ceiling, figures["step_p50"])
        if row.variant != DEFAULT and (plain := measured.get(row.beside(variant=DEFAULT))):
            found["over_default"] = rate / plain["output_tokens_per_second"]
        sums, batch = measured.get(f"all-reduce-tp{row.ranks}"), batch_of(row.workload)
        if sums and batch and row.variant != DRAFT:
            way = row.variant if row.variant in WAYS else next(iter(sums["ways"]))
            found["all_reduce_seconds"] = sums["sums"] * 1e-6 * sums["ways"][way][str(batch)]["microseconds"]
        if predicted is not None:
            found |= {"predicted": predicted, "over_predicted": rate / predicted["output_tokens_per_second"]}
        as_public = self.model_config == "llama-3-70b" and row.method == "fp8" and self.asked.scale == 1
        if as_public and row.workload.startswith("saturated") and row.variant == DEFAULT and row.ranks in PUBLIC:
            found["published"] = PUBLIC[row.ranks]
        return found


def _tell(figures: Figures) -> str:
    if "ways" in figures:
        ways = figures["ways"].items()
        return ", ".join(f"{way} {min(one['microseconds'] for one in sums.values()):,.1f} µs" for way, sums in ways)
    if "differing" in figures:
        return f"{figures['differing']} of {figures['tokens']} tokens differ"
    told = f"{figures['output_tokens_per_second']:,.1f} output tokens/s, {1e3 * figures['itl_p50']:.2f} ms a token"
    if "efficiency" in figures:
        told += f", efficiency {figures['efficiency']['share']:.2f}"
    return told + (f", {figures['over_predicted']:.2f} of the prediction" if "over_predicted" in figures else "")


def checks_of(measured: dict[str, Figures], machine: str, scale: float) -> list[Check]:
    """Tokens are the same everywhere; on H200s, whole lengths scale and are predicted as they should be."""
    differing = [figures["differing"] for figures in measured.values() if "differing" in figures]
    checks = [check("tokens_differing_by_ranks", sum(differing), "<=", 0)] if len(differing) > 1 else []
    if "H200" not in machine or scale != 1:
        return checks
    eight = measured.get("tp8-fp8-decode-64")
    if eight and eight["efficiency"]["of"] == 1:
        checks.append(check("tp8_decode64_fp8_efficiency", eight["efficiency"]["share"], ">=", LEAST_EFFICIENCY))
    for name, figures in measured.items():
        if "over_predicted" in figures:
            off = abs(figures["over_predicted"] - 1)
            checks.append(check(f"{name.replace('-', '_')}_off_prediction", off, "<=", MOST_OFF))
    return checks
