"""What a round of drafts costs here, by batch size: measured once, before the first request."""

from __future__ import annotations

import logging
import time

import numpy as np
import torch

from refimpl.executor.model_runner import ModelRunner
from refimpl.outputs import Admission, Batch, NewBlocks, SchedulerOutput
from refimpl.speculative.lengths import RoundCosts, ladder

log = logging.getLogger(__name__)

BATCH_SIZES = (1, 8, 64)
CONTEXT = 64
"""Tokens of each sequence that is timed."""
ROUNDS = 3
"""Steps that are timed of each kind, after one that warms up; their median counts."""


def measure_rounds(runner: ModelRunner, most: int, limits: tuple[int, int]) -> RoundCosts:
    """Time steps and rounds in an empty cache; nothing of them stays but what lies in blocks that nobody owns.

    Args:
        runner: with a proposer, and a cache of free blocks.
        most: the largest number of drafts.
        limits: the most sequences and the most tokens of a step.

    """
    numbers = ladder(most)
    step: dict[int, float] = {}
    check: dict[int, dict[int, float]] = {}
    draft: dict[int, dict[int, float]] = {}
    for size in [size for size in BATCH_SIZES if size <= limits[0]]:
        timer = _Timer(runner, size, most)
        if size * max(CONTEXT, 1 + most) > limits[1] or not timer.fits:
            break
        step[size] = timer.time(0)[0]
        rounds = {number: timer.time(number) for number in numbers}
        draft[size] = {number: drafting for number, (_, drafting) in rounds.items()}
        check[size] = {number: max(step[size], whole - drafting) for number, (whole, drafting) in rounds.items()}
    if not step:  # too small a cache to try anything
        step, check, draft = {1: 1.0}, {1: dict.fromkeys(numbers, 1.0)}, {1: dict.fromkeys(numbers, 0.0)}
    costs = RoundCosts(step, check, draft)
    told = ", ".join(
        f"{size}: {', '.join(f'{costs.round_over_step(size, n):.2f} for {n}' for n in numbers)}" for size in step
    )
    log.info("speculation: a round costs, in steps without drafts, by batch size and number of drafts: %s", told)
    return costs


class _Timer:
    """Steps of ``size`` sequences, each of ``CONTEXT`` tokens at first, in the first slots."""

    def __init__(self, runner: ModelRunner, size: int, most: int) -> None:
        self._runner, self._rows = runner, tuple(range(size))
        longest = CONTEXT + (ROUNDS + 1) * (most + 1) + 1
        cache = runner.kv_cache
        self._each = -(-longest // cache.block_size)
        """Blocks of a sequence."""
        self.fits = size * self._each <= cache.num_blocks and longest <= runner.input_batch.token_ids.shape[1]

    def time(self, num_drafts: int) -> tuple[float, float]:
        """Seconds of a step with so many drafts a row, and of the drafting in it."""
        rows = self._rows
        self._runner.execute(self._prompts())
        drafts = (num_drafts,) * len(rows) if num_drafts else ()
        step = SchedulerOutput(0, Batch(2 + num_drafts, rows, rows, (1 + num_drafts,) * len(rows), drafts))
        whole, drafting = [], []
        for _ in range(ROUNDS + 1):  # the first also brings a draft model up to date
            begin = time.perf_counter()
            self._runner.execute(step)
            self._wait()
            whole.append(time.perf_counter() - begin)
            drafting.append(self._runner.speculation.seconds if num_drafts and self._runner.speculation else 0.0)
        return float(np.median(whole[1:])), float(np.median(drafting[1:]))

    def _prompts(self) -> SchedulerOutput:
        """All sequences anew, computed up to their last token."""
        vocab_size, each = self._runner.model.config.vocab_size, self._each
        tokens = tuple(place % vocab_size for place in range(CONTEXT))
        return SchedulerOutput(
            0,
            Batch(1, self._rows, self._rows, (CONTEXT,) * len(self._rows)),
            admitted=tuple(Admission(row, row, tokens, CONTEXT, 0, seed=0, path=row) for row in self._rows),
            new_blocks=tuple(NewBlocks(row, tuple(range(1 + row * each, 1 + (row + 1) * each))) for row in self._rows),
        )

    def _wait(self) -> None:
        if self._runner.input_batch.device.type == "cuda":
            torch.cuda.synchronize(self._runner.input_batch.device)
