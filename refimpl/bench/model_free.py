"""The real scheduler and cache manager over thousands of requests, without a model: for bench memory and batching."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

from refimpl.cache import make_kv_cache_manager
from refimpl.config import EngineArgs
from refimpl.executor.model_free import ModelFreeExecutor
from refimpl.outputs import SchedulerOutput
from refimpl.request import Request, Sequence
from refimpl.request_metrics import RequestMetrics
from refimpl.sampling_params import SamplingParams
from refimpl.scheduler import Scheduler
from refimpl.scheduler.choose import make_scheduler
from refimpl.scheduler.policies import choose_policy

WAITING = 512
"""Requests kept in the queue: more would only take memory."""


def make_request(number: int, prompt: int, output: int) -> Request:
    """A request of ``prompt`` made-up tokens that ends after ``output``; no two prompts begin alike."""
    token_ids = [number, *([1] * (prompt - 1))]
    params = SamplingParams(max_tokens=output, ignore_eos=True)
    request = Request(str(number), None, token_ids, params, seed=0, max_tokens=output, metrics=RequestMetrics(0.0))
    request.sequences = [Sequence(number, request, 0, list(token_ids), prompt, path=number)]
    return request


def run_model_free(
    args: EngineArgs,
    num_blocks: int,
    lengths: Iterable[tuple[int, int]],
    each_step: Callable[[Scheduler, SchedulerOutput], None],
) -> Scheduler:
    """Serve requests of (prompt, output) tokens, all of them waiting from the beginning, until none is left.

    Time is counted in steps. ``each_step`` is called when a step is planned.
    """
    config = args.scheduler_config(args.max_model_len or num_blocks * args.block_size, num_blocks * args.block_size)
    kv = make_kv_cache_manager(args, num_blocks, config.max_model_len)
    scheduler = make_scheduler(args, config, kv, (), lambda: float(scheduler.step), choose_policy(args.scheduling_policy))
    executor = ModelFreeExecutor(num_blocks)
    coming = enumerate(lengths)
    while True:
        for number, (prompt, output) in itertools.islice(coming, max(0, WAITING - len(scheduler.waiting))):
            scheduler.add(make_request(number, prompt, output))
        if not scheduler.has_unfinished:
            return scheduler
        planned = scheduler.schedule()
        each_step(scheduler, planned)
        scheduler.update(planned, executor.run(planned))
