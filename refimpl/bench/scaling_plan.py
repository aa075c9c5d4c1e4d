"""What ``refimpl bench scaling`` measures on which numbers of ranks, and what its figures are held against: arithmetic."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from refimpl.bench.rows import Figures
from refimpl.bench.sides import Requests
from refimpl.config import EngineArgs, ModelConfig
from refimpl.errors import ConfigError
from refimpl.model_shares import check_size
from refimpl.simulate import HARDWARE, Deployment, Roofline, Simulation, TraceRequest
from refimpl.simulate.hardware import find_hardware
from refimpl.simulate.models import find_format

METHODS = {"none": "bfloat16", "fp8": "fp8", "awq": "awq"}
"""The simulator's weight format of each."""
WORKLOADS = ("decode-1", "decode-16", "decode-64", "decode-192", "mixed-128", "mixed-512", "saturated-512")
DEFAULT, DRAFT = "default", "draft"
VARIANTS = {
    DEFAULT: None,
    "eager": ("decode-1", "decode-64"),
    "one_shot": ("decode-1", "decode-64"),
    "two_shot": ("decode-1", "decode-64"),
    DRAFT: ("decode-1", "decode-16", "decode-64"),
}
"""Ways to run, each with the workloads that it is measured by; None is all."""
OF_GPUS = ("eager", "one_shot", "two_shot")


@dataclass(frozen=True)
class Machine:
    """Where it is measured."""

    name: str
    gpus: int
    """0: ranks are processes of the CPU."""
    memory_bytes: int
    """Of one GPU."""
    read_bytes_per_second: float
    """The ceiling, as measured on one of them."""

    @property
    def hardware(self) -> str | None:
        """What the simulator calls it; None if it knows no such device."""
        return next((name for name in HARDWARE if name in self.name.lower()), None) if self.gpus else "cpu"


@dataclass(frozen=True)
class Row:
    """One figure of the result: who, how, and what was asked."""

    ranks: int
    method: str
    variant: str
    workload: str

    @property
    def name(self) -> str:
        """Such as tp8-fp8-decode-64, or tp8-fp8-eager-decode-64."""
        variant = "" if self.variant == DEFAULT else f"-{self.variant}"
        return f"tp{self.ranks}-{self.method}{variant}-{self.workload}"

    def beside(self, ranks: int | None = None, variant: str | None = None) -> str:
        """The name of the row that differs in this alone."""
        return Row(ranks or self.ranks, self.method, variant or self.variant, self.workload).name


def weight_bytes(model: ModelConfig, ranks: int, method: str) -> float:
    """Bytes of weights that each rank holds."""
    return Roofline(model, find_hardware("h200"), ranks, find_format(METHODS[method])).weight_bytes / ranks


def why_not(model: ModelConfig, ranks: int, method: str, machine: Machine, utilization: float) -> str | None:
    """Why so many ranks cannot hold the model here; None if they can.

    ``utilization``: the share of a GPU's memory that an engine takes.
    """
    try:
        check_size(model, ranks, "this model")
    except ConfigError as error:
        return str(error)
    if not machine.gpus:
        return None
    if ranks > machine.gpus:
        return f"{ranks} ranks need as many GPUs, and there are {machine.gpus} here"
    each, room = weight_bytes(model, ranks, method), utilization * machine.memory_bytes
    if each > room:
        return f"{each / 1e9:.1f} GB of weights a rank, and a GPU has {room / 1e9:.1f} GB for an engine"
    return None


def plan(fitting: Sequence[tuple[int, str]], workloads: Sequence[str], variants: Sequence[str], on_gpus: bool) -> list[Row]:
    """All rows, in the order in which they are measured; those of one engine come together.

    ``fitting`` are numbers of ranks, rising, with a method each; a draft model runs on the most of them.
    """
    return [
        Row(ranks, method, variant, workload)
        for ranks, method in fitting
        for variant in variants
        if _has(variant, ranks, max(n for n, other in fitting if other == method), on_gpus)
        for workload in workloads
        if workload in (VARIANTS[variant] or workloads)
    ]


def _has(variant: str, ranks: int, most: int, on_gpus: bool) -> bool:
    if variant == DRAFT:
        return ranks == most
    needs_several = variant in ("one_shot", "two_shot")
    return (on_gpus or variant not in OF_GPUS) and (ranks > 1 or not needs_several)


def efficiency(rate: float, ranks: int, fewest_rate: float, fewest: int) -> float:
    """What a rank brings, over what it brings on the fewest ranks that were measured."""
    return (rate / ranks) / (fewest_rate / fewest)


def share_of_floor(read_bytes: float, read_bytes_per_second: float, seconds: float) -> float:
    """The time that reading a rank's weights takes at the least, over that of a step."""
    return read_bytes / read_bytes_per_second / seconds


def sums_in_a_step(model: ModelConfig) -> int:
    """All-reduces of a step: two a layer, and the embedding's."""
    return 2 * model.num_hidden_layers + 1


def batch_of(workload: str) -> int | None:
    """Sequences that decode together; None where that changes while it runs."""
    kind, _, count = workload.partition("-")
    return int(count) if kind == "decode" else None


def predict(
    options: dict[str, Any], model: str, hardware: str, row: Row, num_blocks: int, requests: Requests
) -> dict[str, float | None]:
    """What the simulator says of a row: output tokens a second, and the median time between two tokens.

    ``options`` are the engine's, ``num_blocks`` those of its cache.
    """
    own = {"enable_prefix_caching": False, "event_log_size": 0, "num_gpu_blocks_override": num_blocks}
    deployment = Deployment.of(model, hardware, row.ranks, METHODS[row.method])
    coming = [TraceRequest(0.0, len(prompt), output) for prompt, output in requests]
    figures = Simulation(EngineArgs.from_options(options | own), deployment, coming).run()
    return {"output_tokens_per_second": figures["throughput"], "itl_p50": figures["itl_p50"]}


def rows_of(results: dict[str, Any]) -> Iterator[Figures]:
    """The rows of a result that are an engine's, measured or not."""
    return (figures for figures in results.values() if "workload" in figures)
