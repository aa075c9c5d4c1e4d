"""What swapping and recomputing cost here: measured once, before the first request, for ``preemption_mode="auto"``."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch

from refimpl.config import ModelConfig
from refimpl.executor.model_runner import ModelRunner
from refimpl.outputs import Admission, Batch, NewBlocks, SchedulerOutput
from refimpl.scheduler.preemption import PreemptionCosts

log = logging.getLogger(__name__)

MOST_TOKENS = 256
"""Length of the prompt that is timed: long enough that its matrix products run at the rate of long ones."""
MOST_BLOCKS = 64
"""Blocks that are moved to time the link."""


def measure(runner: ModelRunner, model: ModelConfig, num_tokens: int, num_host_blocks: int) -> PreemptionCosts:
    """Time a prompt and a transfer in an empty cache; nothing of them stays but what lies in blocks that nobody owns.

    Attention is reckoned over whole contexts, also where layers have a window: recomputing a long text then costs less.

    Args:
        runner: with a cache of free blocks and a swap space.
        model: its configuration.
        num_tokens: the most that a step computes.
        num_host_blocks: blocks of the swap space.

    """
    cache = runner.kv_cache
    num_tokens = min(num_tokens, MOST_TOKENS, cache.num_blocks * cache.block_size)
    num_blocks = -(-num_tokens // cache.block_size)
    blocks = NewBlocks(0, tuple(range(1, num_blocks + 1)))
    prompt = SchedulerOutput(
        0, Batch(1, (0,), (0,), (num_tokens,)), admitted=(_prompt(num_tokens + 1),), new_blocks=(blocks,)
    )
    seconds = _time(lambda: runner.execute(prompt), runner)
    moved = min(num_host_blocks, cache.num_blocks, MOST_BLOCKS)
    transfers = [(block_id, block_id) for block_id in range(1, moved + 1)]

    def there_and_back() -> None:
        cache.swap_out(transfers)
        cache.swap_in(transfers)

    kv_bytes = model.kv_bytes_per_token(cache.layers[0].k.element_size())
    pair = 4 * model.num_hidden_layers * model.num_attention_heads * model.head_dim
    flops = 2 * model.num_parameters * num_tokens + pair * num_tokens * (num_tokens + 1) / 2
    costs = PreemptionCosts(
        kv_bytes_per_token=kv_bytes,
        link_bytes_per_second=2 * moved * cache.block_size * kv_bytes / _time(there_and_back, runner),
        flops_per_token=2 * model.num_parameters,
        attention_flops_per_token_pair=pair,
        flops_per_second=flops / seconds,
    )
    log.info(
        "preemption: the link moves %.2f GB/s, the model computes %.1f GFLOP/s; swapping is cheaper from %d tokens on",
        costs.link_bytes_per_second / 1e9,
        costs.flops_per_second / 1e9,
        costs.crossover,
    )
    return costs


def _prompt(num_tokens: int) -> Admission:
    """A prompt in slot 0, a token longer than what is computed of it, so that nothing is drawn."""
    return Admission(0, 0, (0,) * num_tokens, num_tokens, 0, 0, 0)


def _time(work: Callable[[], object], runner: ModelRunner) -> float:
    """Seconds of the second of two runs: the first one warms up."""
    seconds = 0.0
    for _ in range(2):
        begin = time.perf_counter()
        work()
        if runner.input_batch.device.type == "cuda":
            torch.cuda.synchronize(runner.input_batch.device)
        seconds = time.perf_counter() - begin
    return max(seconds, 1e-9)
