"""A swap space behind a link: whatever runs first of what may, each block arrives whole, and nobody reads it too early."""

import random
from collections import deque
from functools import partial

import pytest
import torch
from swap_program import HOST_BLOCKS, Program, pools_of

from refimpl import Engine, EngineArgs, SamplingParams
from refimpl.cache import kv_cache, staged_blocks
from refimpl.cache.block_moves import PlainMoves
from refimpl.cache.staged_blocks import StagedBlocks, blocks_a_buffer, staging_bytes


class LateStream:
    """A stream whose work is done when somebody lets it go on."""

    def __init__(self, waits=True):
        self.queue = deque()
        self.waits = waits

    def run(self, work):
        self.queue.append(work)

    def record(self):
        event = []
        self.queue.append(lambda: event.append("reached"))
        return event

    def wait(self, event):
        if self.waits:
            self.queue.append(event)

    @property
    def can_go_on(self):
        return bool(self.queue) and self.queue[0] != []  # an event that nobody reached

    def go_on(self):
        work = self.queue.popleft()
        if callable(work):
            work()


class Now:
    """A stream whose work is done at once; it has whoever it waits for go on."""

    def run(self, work):
        work()

    def record(self):
        return lambda: None

    def wait(self, event):
        event()

    def synchronize(self):
        pass


class Lazy:
    """A stream that does nothing before somebody waits for it."""

    def __init__(self):
        self.queue, self.done = deque(), 0

    def run(self, work):
        self.queue.append(work)

    def record(self):
        return partial(self._go_on_until, self.done + len(self.queue))

    def _go_on_until(self, count):
        while self.done < count:
            self.queue.popleft()()
            self.done += 1

    def wait(self, event):
        self.queue.append(event)

    def synchronize(self):
        self.record()()


ORDERS = {
    "compute first": lambda ready, rng: ready[0],
    "link first": lambda ready, rng: ready[-1],
    "any": lambda ready, rng: rng.choice(ready),
}


def run_late(seed, order, staging_blocks=2, waits=True, moves=PlainMoves):
    """Order a whole program, then let the streams run; what differs from the oracle."""
    pools, compute, link = pools_of(4, torch.float32), LateStream(waits), LateStream(waits)
    store = torch.full((HOST_BLOCKS + 1, 4, *pools[0].shape[1:]), torch.nan)
    staging = [torch.full((staging_blocks, *store.shape[1:]), torch.nan) for _ in range(2)]
    program = Program(StagedBlocks(moves(tuple(pools)), store, staging, compute, link), pools, compute)
    program.run(seed)
    rng = random.Random(seed)
    while compute.queue or link.queue:
        ready = [stream for stream in (compute, link) if stream.can_go_on]
        assert ready, "both streams wait for each other"
        ORDERS[order](ready, rng).go_on()
    assert program.read, "something came back"
    return program.differences()


@pytest.mark.parametrize("staging_blocks", [1, 2, 8])
@pytest.mark.parametrize("order", ORDERS)
def test_blocks_are_whole_in_every_order_that_the_waits_allow(order, staging_blocks):
    for seed in range(20):
        assert run_late(seed, order, staging_blocks) == [], seed


def test_without_the_waits_this_would_be_seen():
    assert all(any(run_late(seed, order, waits=False) for seed in range(3)) for order in ORDERS)


def test_kernels_move_the_same():
    pytest.importorskip("triton")
    from refimpl.kernels.kv_blocks import BlockPools

    if torch.cuda.is_available():
        pytest.skip("tests/cache/test_swap_on_gpu.py does it there")
    assert run_late(1, "any", moves=lambda pools: BlockPools.of(list(pools))) == []


def tokens_of(mode, preempt):
    """Greedy and sampled tokens of a few prompts, two of which begin alike; sequences are preempted at some steps."""
    options = {"swap_space": 0.001, "preemption_mode": "swap"} if mode == "swap" else {}
    options |= {"max_model_len": 64, "num_gpu_blocks_override": 60, "block_size": 4}
    engine = Engine(EngineArgs(model="tiny", dtype="float64", device="cpu", **options))
    for step, request_id in preempt:
        engine.scheduler.preempt_at(step, request_id, mode)
    for number, prompt in enumerate(([1] * 9 + [2], [1] * 9, [5, 6, 7] * 5)):
        params = SamplingParams(temperature=number % 2, seed=3, max_tokens=12, ignore_eos=True, n=1 + number % 2)
        engine.add_request(str(number), prompt, params)
    tokens = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens[output.request_id] = [sample.token_ids for sample in output.outputs]
    swapped = sum(len(record.swapped_in) for record in engine.events.records)
    engine.close()
    return tokens, swapped


def test_the_engine_draws_the_same_tokens_over_a_link_that_does_nothing_unasked(monkeypatch):
    made = []

    def over_a_lazy_link(pools, moves, num_host_blocks):
        store = torch.full((num_host_blocks + 1, len(pools), *pools[0].shape[1:]), torch.nan, dtype=pools[0].dtype)
        staging = [torch.full((2, *store.shape[1:]), torch.nan, dtype=store.dtype) for _ in range(2)]
        made.append(StagedBlocks(moves, store, staging, Now(), Lazy()))
        return made[-1]

    expected, _ = tokens_of("recompute", ())
    monkeypatch.setattr(kv_cache, "host_blocks_of", over_a_lazy_link)
    tokens, swapped = tokens_of("swap", [(step, str(step % 3)) for step in range(2, 14, 2)])
    assert tokens == expected
    assert swapped > 10
    assert made[-1].store.untyped_storage().nbytes() == 0, "given back when the engine closes"


def test_swapping_out_leaves_the_computing_alone():
    """All that the buffers hold is ordered on the compute stream without a wait for the link."""
    pools, compute, link = pools_of(2, torch.float32), LateStream(), LateStream()
    store = torch.zeros(HOST_BLOCKS + 1, 2, *pools[0].shape[1:])
    staging = [torch.zeros(3, *store.shape[1:]) for _ in range(2)]
    blocks = StagedBlocks(PlainMoves(tuple(pools)), store, staging, compute, link)
    blocks.swap_out([(block, block) for block in range(1, 7)])
    while compute.can_go_on:
        compute.go_on()
    assert not compute.queue
    blocks.swap_out([(7, 7)])
    while compute.can_go_on:
        compute.go_on()
    assert compute.queue, "a third piece waits until a buffer is empty"


def test_neighbours_on_the_host_move_as_one_piece(monkeypatch):
    copied = []
    original = torch.Tensor.copy_

    def copy(self, source, non_blocking=False):
        if non_blocking:
            copied.append(len(self))
        return original(self, source, non_blocking)

    pools, stream = pools_of(2, torch.float32), Now()
    store = torch.zeros(HOST_BLOCKS + 1, 2, *pools[0].shape[1:])
    staging = [torch.zeros(8, *store.shape[1:]) for _ in range(2)]
    blocks = StagedBlocks(PlainMoves(tuple(pools)), store, staging, stream, stream)
    monkeypatch.setattr(torch.Tensor, "copy_", copy)
    blocks.swap_out([(9, 4), (1, 2), (5, 3), (3, 7), (2, 6)])
    assert copied == [3, 2]
    blocks.swap_in([(7, 1), (3, 2), (4, 9)])
    assert copied[2:] == [2, 1]


def test_staging_is_bounded_and_no_larger_than_the_swap_space():
    block = 2 * 2**20  # 16 tokens of Llama-3-8B
    assert blocks_a_buffer(block, 4096) == 64
    assert staging_bytes(block, 4096) == staged_blocks.STAGING_BYTES
    assert staging_bytes(block, 5) == 6 * block
    assert staging_bytes(staged_blocks.STAGING_BYTES, 100) == 2 * staged_blocks.STAGING_BYTES  # one block each, at least
