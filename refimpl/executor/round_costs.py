"""What a round of drafts costs here, by batch size: measured once, before the first request."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import torch

from refimpl.executor.model_runner import ModelRunner
from refimpl.outputs import Admission, Batch, NewBlocks, SchedulerOutput
from refimpl.speculative.costs import RoundCosts
from refimpl.speculative.lengths import ladder

log = logging.getLogger(__name__)

BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64)
"""Of steps without drafts."""
ROUND_SIZES = (1, 4, 16, 64)
"""Of rounds: with all numbers of drafts they make many numbers of tokens."""
CONTEXT = 64
"""Tokens of each sequence that is timed."""
ROUNDS = 2
"""Times that each kind is timed, in turn, after a turn that warms up. The shortest counts: what else the machine does only
lengthens a step."""
MOST_SECONDS = 2.0
"""After which larger batches are left out: on a slow machine few sequences are served together."""


def measure_rounds(
    runner: ModelRunner, most: int, limits: tuple[int, int], sizes: Sequence[int] = BATCH_SIZES, context: int = CONTEXT
) -> RoundCosts:
    """Time steps and rounds while nothing runs; nothing of them stays but what lies in blocks, whose contents are lost.

    Args:
        runner: with a proposer, and a cache of free blocks that no prefix cache counts on.
        most: the largest number of drafts.
        limits: the most sequences and the most tokens of a step.
        sizes: batch sizes, rising. Rounds are timed at those of ``ROUND_SIZES``, and at the first.
        context: tokens of each sequence at first.

    """
    numbers, begin = ladder(most), time.perf_counter()
    step: dict[int, float] = {}
    check: dict[int, float] = {}
    draft: dict[int, dict[int, float]] = {}
    for size in [size for size in sizes if size <= limits[0]]:
        timer = _Timer(runner, size, most, context)
        # Ranks must stop together: one that is too slow stops all.
        too_slow = runner.ranks.least(int(not step or time.perf_counter() - begin <= MOST_SECONDS)) == 0
        if size * max(context, 1 + most) > limits[1] or not timer.fits or too_slow:
            break
        with_rounds = size in ROUND_SIZES or size == sizes[0]
        timed = timer.time([0, *numbers] if with_rounds else [0])
        step[size] = timed.pop(0)[0]
        for number, (whole, drafting) in timed.items():
            tokens = size * (number + 1)
            check[tokens] = min(whole - drafting, check.get(tokens, whole))
        if timed:
            draft[size] = {number: drafting for number, (_, drafting) in timed.items()}
    if not step:  # too small a cache to try anything
        step, check, draft = {1: 1.0}, {1 + most: 1.0}, {1: dict.fromkeys(numbers, 0.0)}
    costs = RoundCosts(step, check, draft)
    told = ", ".join(
        f"{size}: {', '.join(f'{costs.round_over_step(size, n):.2f} for {n}' for n in numbers)}" for size in draft
    )
    log.info("speculation: a round costs, in steps without drafts, by batch size and number of drafts: %s", told)
    return costs


class _Timer:
    """Steps of ``size`` sequences, each of ``context`` tokens at first, in the first slots."""

    def __init__(self, runner: ModelRunner, size: int, most: int, context: int) -> None:
        self._runner, self._rows, self._context = runner, tuple(range(size)), context
        longest = context + 2 * sum(number + 1 for number in (0, *ladder(most))) + 1
        cache = runner.kv_cache
        self._each = -(-longest // cache.block_size)
        """Blocks of a sequence."""
        self.fits = size * self._each <= cache.num_blocks and longest <= runner.input_batch.token_ids.shape[1]

    def time(self, numbers: Sequence[int]) -> dict[int, tuple[float, float]]:
        """By number of drafts a row: the least seconds of a step, and of the drafting in it."""
        found: dict[int, tuple[float, float]] = {}
        for turn in range(ROUNDS + 1):
            self._runner.execute(self._prompts())
            for number in numbers:
                drafts = (number,) * len(self._rows) if number else ()
                step = SchedulerOutput(0, Batch(2, self._rows, self._rows, (1 + number,) * len(self._rows), drafts))
                self._seconds(step)  # brings a draft model up to date
                whole, drafting = self._seconds(step)
                if turn:
                    before = found.get(number, (whole, drafting))
                    found[number] = min(whole, before[0]), min(drafting, before[1])
        return found

    def _seconds(self, step: SchedulerOutput) -> tuple[float, float]:
        """Of a step, and of the drafting in it."""
        speculation = self._runner.speculation
        assert speculation is not None
        begin, speculation.seconds, speculation.measuring = time.perf_counter(), 0.0, True
        try:
            self._runner.execute(step)
            self._wait()
        finally:
            speculation.measuring = False
        return time.perf_counter() - begin, speculation.seconds

    def _prompts(self) -> SchedulerOutput:
        """All sequences anew, computed up to their last token."""
        vocab_size, each, context = self._runner.model.config.vocab_size, self._each, self._context
        tokens = tuple(place % min(vocab_size, 32) for place in range(context))
        return SchedulerOutput(
            0,
            Batch(1, self._rows, self._rows, (context,) * len(self._rows)),
            admitted=tuple(Admission(row, row, tokens, context, 0, seed=0, path=row) for row in self._rows),
            new_blocks=tuple(NewBlocks(row, tuple(range(1 + row * each, 1 + (row + 1) * each))) for row in self._rows),
        )

    def _wait(self) -> None:
        if self._runner.input_batch.device.type == "cuda":
            torch.cuda.synchronize(self._runner.input_batch.device)
