"""ModelClock: which part of rounds of speculation the two models take; the rest is sampling, bookkeeping and the host."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from refimpl.executor.model_runner import ModelRunner
from refimpl.speculative.draft_model import DraftModelProposer


class ModelClock:
    """Sums up the time of calls: on a GPU between two marks in its stream, so that nothing waits for it."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._calls: list[tuple[Any, Any]] = []

    def seconds(self) -> float:
        """Of all calls so far."""
        if not self._on_gpu:
            return float(sum(end - begin for begin, end in self._calls))
        torch.cuda.synchronize()
        return float(sum(begin.elapsed_time(end) for begin, end in self._calls)) / 1e3

    def timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same call, timed."""

        def wrapped(*arguments: Any, **options: Any) -> Any:
            begin = self._mark()
            try:
                return call(*arguments, **options)
            finally:
                self._calls.append((begin, self._mark()))

        return wrapped

    def _mark(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


@contextmanager
def models_timed(runner: ModelRunner) -> Iterator[ModelClock]:
    """Within the block, checks and steps of the target, drafts of a draft model, and both output heads are timed."""
    clock = ModelClock(runner.input_batch.device)
    owners: list[tuple[Any, str]] = [(runner, "_hidden"), (runner.model, "compute_logits")]
    if runner.check_graphs is not None:
        owners.append((runner.check_graphs, "replay"))
    proposer = runner.speculation.proposer if runner.speculation is not None else None
    if isinstance(proposer, DraftModelProposer):
        owners += [(proposer, "_forward"), (proposer.model, "compute_logits")]
    for owner, name in owners:
        setattr(owner, name, clock.timed(getattr(owner, name)))
    try:
        yield clock
    finally:
        for owner, name in owners:
            delattr(owner, name)  # the class's own is found again
