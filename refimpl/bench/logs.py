"""Event logs of any size for bench widgets: the real scheduler, cache manager and recorder, without a model."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable

from refimpl.bench.model_free import make_request
from refimpl.cache import KVCacheManager, PrefixCache
from refimpl.config import SchedulerConfig
from refimpl.events import EventLog
from refimpl.executor.model_free import ModelFreeExecutor
from refimpl.recorder import Recorder
from refimpl.scheduler import Scheduler

BLOCK_SIZE = 16
STEP_SECONDS = 0.02
QUEUE = 16
"""Requests kept waiting."""


class Run:
    """An engine without a model that records all its steps; one lasts :data:`STEP_SECONDS` of the log.

    Args:
        num_blocks: of the pool.
        slots: sequences that run at once.
        budget: tokens a step.
        lengths: (prompt, output) tokens of each request, in order of arrival.

    """

    def __init__(self, num_blocks: int, slots: int, budget: int, lengths: Iterable[tuple[int, int]]) -> None:
        config = SchedulerConfig(
            max_num_seqs=slots,
            max_num_batched_tokens=budget,
            max_model_len=4096,
            enable_chunked_prefill=True,
            enable_kv_cache=True,
        )
        kv = KVCacheManager(num_blocks, BLOCK_SIZE, PrefixCache())
        self._now = 0.0
        self._scheduler = Scheduler(config, kv, (), self._clock)
        self._recorder = Recorder("none", config, kv, False, 1_000_000, self._clock, _text)
        self._executor = ModelFreeExecutor(num_blocks)
        self._coming = enumerate(lengths)

    def _clock(self) -> float:
        return self._now

    @property
    def log(self) -> EventLog:
        """What is recorded."""
        return self._recorder.events

    def step(self) -> bool:
        """Take a step; False if nothing is left to do."""
        for number, (prompt, output) in itertools.islice(self._coming, max(0, QUEUE - len(self._scheduler.waiting))):
            self._scheduler.add(make_request(number, prompt, output))
        if not self._scheduler.has_unfinished:
            return False
        planned = self._scheduler.schedule()
        plan_time = self._recorder.plan_time(self._scheduler)
        self._now += STEP_SECONDS
        self._recorder.record(planned, self._scheduler.update(planned, self._executor.run(planned)), plan_time)
        return True


def _text(token: int) -> str:
    return f" {token}"


def long_run(requests: int = 500, steps: int = 10_000, slots: int = 48) -> EventLog:
    """The first ``steps`` steps of ``requests`` requests of mixed lengths, in a pool that is now and then too small."""
    rng = random.Random(0)  # noqa: S311
    mean = steps * slots // requests
    lengths = [(rng.randrange(50, 600), rng.randrange(mean * 6 // 10, mean * 15 // 10)) for _ in range(requests)]
    run = Run(slots * 50, slots, 1024, lengths)
    while len(run.log.records) < steps and run.step():
        pass
    return run.log


def large_pool(num_blocks: int = 100_000, sequences: int = 500) -> Run:
    """A pool three quarters of which belong to sequences that decode; a step or two change about 1% of its blocks.

    It is stepped until all of them run. Each lasts 250 steps more on average, and another takes its place.
    """
    rng = random.Random(0)  # noqa: S311
    prompt = num_blocks * 3 // 4 // sequences * BLOCK_SIZE - 2 * BLOCK_SIZE
    lengths = ((prompt - rng.randrange(BLOCK_SIZE), rng.randrange(1, 500)) for _ in itertools.count())
    run = Run(num_blocks, sequences, 16 * prompt, lengths)
    while not run.log.records or run.log.records[-1].num_running < sequences - 4:
        run.step()
    return run
