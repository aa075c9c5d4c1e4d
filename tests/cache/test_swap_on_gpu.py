"""Swapping and copying blocks on a GPU: bit for bit, whichever stream is late, beside the computing, and all given back."""

import gc
import itertools
import random

import pytest
import torch
from swap_program import HOST_BLOCKS, Program, pools_of, same

from refimpl import Engine, EngineArgs, SamplingParams
from refimpl.cache import staged_blocks
from refimpl.cache.block_moves import PlainMoves, moves_of
from refimpl.cache.kv_cache import KVCache
from refimpl.cache.pinned import _forget_the_error
from refimpl.cache.staged_blocks import PinnedBlocks
from refimpl.cache.streams import CudaStream
from refimpl.models.tiny import tiny

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="a link and its stream are a GPU's")
DEVICE = torch.device("cuda", 0)
LONG = 400_000_000
"""Cycles that a stream sleeps where another is to be seen to go on: a fifth of a second."""
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def cache_of(dtype=torch.float32, num_blocks=40, num_host_blocks=30):
    """A cache of three layers whose every block holds numbers of its own."""
    config = tiny(num_hidden_layers=3, num_attention_heads=3, num_key_value_heads=3, head_dim=16).config
    cache = KVCache(config, num_blocks, 8, dtype, DEVICE, num_host_blocks)
    for number, pool in enumerate(pools(cache)):
        pool.copy_(torch.rand(pool.shape, generator=torch.Generator().manual_seed(number)))
    return cache


def pools(cache):
    return [pool for layer in cache.layers for pool in (layer.k, layer.v)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("staging_blocks", [2, 7, 1000])
def test_blocks_come_back_bit_for_bit_into_a_cache_of_nan(monkeypatch, dtype, staging_blocks):
    block_bytes = 6 * 8 * 3 * 16 * dtype.itemsize
    monkeypatch.setattr(staged_blocks, "STAGING_BYTES", staging_blocks * block_bytes)
    cache, rng = cache_of(dtype), random.Random(staging_blocks)
    before = [pool.clone() for pool in pools(cache)]
    out = list(zip(rng.sample(range(1, 41), 23), rng.sample(range(1, 31), 23), strict=True))
    cache.swap_out(out)
    for pool in pools(cache):
        pool.fill_(torch.nan)
    back = dict(zip([host for _, host in out], rng.sample(range(1, 41), 23), strict=True))
    cache.swap_in(list(back.items()))
    expected = [torch.full_like(pool, torch.nan) for pool in before]
    for device, host in out:
        for pool, source in zip(expected, before, strict=True):
            pool[back[host]] = source[device]
    assert all(map(same, pools(cache), expected))
    cache.release()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_copies_are_made_in_every_layer(dtype):
    cache = cache_of(dtype)
    expected = [pool.clone() for pool in pools(cache)]
    for pool in expected:
        pool[[3, 12, 40]] = pool[[7, 7, 2]]
    cache.copy_blocks([(7, 3), (7, 12), (2, 40)])
    assert all(map(same, pools(cache), expected))
    cache.release()


@pytest.mark.parametrize("moves", [moves_of, lambda pools: PlainMoves(tuple(pools))], ids=["kernels", "plain"])
@pytest.mark.parametrize("late", ["compute", "link", "either"])
def test_random_swapping_beside_computing_with_a_late_stream(monkeypatch, moves, late):
    """Freed blocks are written at once, blocks that come back are read at once, host blocks are used again at once."""
    of_program = pools_of(4, torch.bfloat16, DEVICE)
    monkeypatch.setattr(staged_blocks, "STAGING_BYTES", 4 * 4 * of_program[0][0].nbytes)  # two blocks a buffer
    for seed in range(15):
        of_program = pools_of(4, torch.bfloat16, DEVICE)
        blocks = PinnedBlocks(of_program, moves(of_program), HOST_BLOCKS)
        compute, link, rng = CudaStream(DEVICE), blocks._link, random.Random(seed)

        def sleep(compute=compute, link=link, rng=rng):
            stream = {"compute": compute, "link": link, "either": rng.choice([compute, link])}[late]
            stream.run(lambda: torch.cuda._sleep(rng.choice([0, 200_000, 2_000_000])))

        program = Program(blocks, of_program, compute, between=sleep)
        program.run(seed)
        torch.cuda.synchronize()
        assert program.differences() == [], seed
        blocks.release()


@pytest.fixture
def warm():
    """A cache whose kernels are compiled, and its two streams."""
    cache = cache_of()
    compute, link = CudaStream(DEVICE), cache.host_blocks._link
    move(cache)
    sleep_on(compute), sleep_on(link)
    move(cache)  # while both sleep, so that the pinned memory of so many orders is there too
    torch.cuda.synchronize()
    yield cache, compute, link
    torch.cuda.synchronize()
    cache.release()


def move(cache):
    """Half of the blocks out and in, and a copy."""
    cache.swap_out([(block, block) for block in range(1, 21)])
    cache.swap_in([(block, 41 - block) for block in range(1, 21)])
    cache.copy_blocks([(1, 2)])


def sleep_on(stream):
    """Keep a stream busy; an event behind that."""
    stream.run(lambda: torch.cuda._sleep(LONG))
    return stream.record()


def test_swapping_out_waits_for_no_link(warm):
    cache, compute, link = warm
    awake = sleep_on(link)
    cache.swap_out([(block, block) for block in range(1, 21)])
    compute.synchronize()
    assert not awake.query(), "the computing went on while the link was busy"


def test_a_call_waits_for_neither_stream(warm):
    cache, compute, link = warm
    awake = sleep_on(compute), sleep_on(link)
    move(cache)
    assert not any(event.query() for event in awake)


def test_swapping_in_goes_over_the_link_while_an_earlier_step_computes(warm):
    cache, compute, link = warm
    cache.swap_out([(block, block) for block in range(1, 21)])
    torch.cuda.synchronize()
    awake = sleep_on(compute)
    cache.swap_in([(block, 41 - block) for block in range(1, 21)])
    link.synchronize()
    assert not awake.query(), "the blocks are there before the step that is computed ends"


# ---------------------------------------------------------------------- memory


def resident():
    """Bytes of the host's memory that this process holds."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


@pytest.mark.parametrize("closed", [True, False], ids=["released", "only dropped"])
def test_locked_memory_is_exact_and_given_back(closed):
    size = 512 * 2**20
    cache_of().release()  # so that the libraries are loaded
    gc.collect()
    before, on_device = resident(), torch.cuda.memory_allocated()
    for _ in range(2):
        cache = cache_of(num_host_blocks=size // (6 * 8 * 3 * 16 * 4))
        store = cache.host_blocks.store
        assert 0 <= store.nbytes - size < 2**20
        assert 0.95 * size < resident() - before < 1.05 * size
        cache.swap_out([(block, block) for block in range(1, 41)])
        if closed:
            cache.release()
        del cache, store
        gc.collect()
        assert resident() - before < 0.05 * size
    assert torch.cuda.memory_allocated() == on_device


def test_memory_that_cannot_be_locked_spoils_nothing_that_comes_after():
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError):
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(0, 4096, 0))
    _forget_the_error(torch.device("cuda"))
    torch.zeros(1, device="cuda").add_(1)
    cache_of(num_host_blocks=4).release()


# ---------------------------------------------------------------------- the engine

PROMPTS = [[random.Random(i).randrange(256) for _ in range(length)] for i, length in enumerate([1, 16, 17, 40, 3, 33])]


def tokens_of(preempt=(), mode="recompute", blocks=400, **options):
    """Greedy tokens of all prompts; also how often they were preempted, and how many blocks were swapped in."""
    args = {"max_num_seqs": 8, "max_model_len": 80, "num_gpu_blocks_override": blocks, "preemption_mode": mode} | options
    args |= {"swap_space": 0.001} if mode == "swap" else {}
    engine = Engine(EngineArgs(model="tiny", dtype="float32", device="cuda", **args))
    for step, request_id in preempt:
        engine.scheduler.preempt_at(step, request_id, mode)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    for number, prompt in enumerate(PROMPTS):
        engine.add_request(str(number), prompt, params)
    tokens, preemptions = {}, 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens[output.request_id] = output.outputs[0].token_ids
            preemptions += output.metrics.num_preemptions if output.finished else 0
        assert engine.audit() == []
    swapped = sum(len(record.swapped_in) for record in engine.events.records)
    engine.close()
    return [tokens[str(number)] for number in range(len(PROMPTS))], preemptions, swapped


@pytest.mark.parametrize(("eager", "overlap"), list(itertools.product([True, False], [True, False])))
def test_tokens_are_the_same_whether_swapped_recomputed_or_left_alone(eager, overlap):
    options = {"enforce_eager": eager, "async_scheduling": overlap}
    expected, none, _ = tokens_of(**options)
    assert none == 0
    planned = [(step, str(number)) for step in range(2, 18, 2) for number in (step % 6, (step + 3) % 6)]
    for mode in ("swap", "recompute"):
        tokens, preemptions, swapped = tokens_of(planned, mode, **options)
        assert tokens == expected, mode
        assert preemptions > 8
        assert (swapped > 0) == (mode == "swap")
        tokens, preemptions, _ = tokens_of((), mode, blocks=9, **options)  # too few for all at once
        assert tokens == expected, mode
        assert preemptions > 0
