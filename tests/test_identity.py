"""The same tokens whatever the batch, the budget, the block size, the order, the overlap or the preemptions.

In float64 on the tiny model, whose logits are wide: a token differs only if a wrong key or value was read.
"""

import itertools
import random

import pytest
from counts import COUNTS

from refimpl import Engine, EngineArgs, SamplingParams

LENGTHS = [1, 16, 17, 40, 3]
PROMPTS = [random.Random(i).choices(range(256), k=length) for i, length in enumerate(LENGTHS)]
MAX_TOKENS = 8
SWAP = {"swap_space": 0.001, "preemption_mode": "swap"}


def params_of(number, n=1):
    """Greedy and sampled requests side by side; a seed of its own, so that the arrival order does not matter."""
    temperature, top_p = [(0, 1.0), (1.0, 1.0), (0.8, 0.9)][number % 3]
    return SamplingParams(temperature=temperature, top_p=top_p, seed=number, max_tokens=MAX_TOKENS, ignore_eos=True, n=n)


def run(order=None, preempt=(), n=1, **options):
    """Token ids of every sample, by prompt; the books are audited after each step. Also the number of preemptions."""
    args = {"max_num_seqs": 16, "max_model_len": 56, "num_gpu_blocks_override": 160} | options
    engine = Engine(EngineArgs(model="tiny", dtype="float64", **args))
    for step, request_id in preempt:
        engine.scheduler.preempt_at(step, request_id, options.get("preemption_mode", "recompute"))
    for number in order or range(len(PROMPTS)):
        engine.add_request(str(number), PROMPTS[number], params_of(number, n))
    tokens, preemptions = {}, 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                assert all(sample.finish_reason == "length" for sample in output.outputs)
                tokens[int(output.request_id)] = [sample.token_ids for sample in output.outputs]
                preemptions += output.metrics.num_preemptions
        assert engine.audit() == []
    assert engine.scheduler.kv.num_free_blocks == engine.scheduler.kv.num_blocks
    assert engine.scheduler.kv.swap.num_free == engine.scheduler.kv.swap.num_blocks
    engine.close()
    return [tokens[number] for number in sorted(tokens)], preemptions


def assert_same_tokens(got, wanted, case=None):
    """Every token of every sample of one engine's run, which is a case."""
    assert got == wanted, case
    COUNTS["same_tokens"] += 1


@pytest.fixture(scope="module")
def expected():
    """One request after the other, everything at its plainest."""
    tokens, preemptions = run(max_num_seqs=1, enable_kv_cache=False)
    assert preemptions == 0
    assert len({tuple(sample[0]) for sample in tokens}) == len(PROMPTS), "the prompts lead to different texts"
    return tokens


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("block_size", [1, 8, 16, 32])
def test_batch_budget_and_block_size_change_nothing(expected, block_size, overlap):
    for max_num_seqs, budget in itertools.product([1, 3, 16], [16, 64, 2048]):
        tokens, _ = run(
            max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, block_size=block_size, async_scheduling=overlap
        )
        assert_same_tokens(tokens, expected, (max_num_seqs, budget))


@pytest.mark.parametrize("overlap", [False, True])
def test_the_order_of_arrival_changes_nothing(expected, overlap):
    orders = [list(reversed(range(len(PROMPTS)))), *(random.Random(s).sample(range(5), 5) for s in range(4))]
    for order in orders:
        tokens, _ = run(order=order, max_num_seqs=3, max_num_batched_tokens=16, async_scheduling=overlap)
        assert_same_tokens(tokens, expected, order)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("mode", "numbers"), [({}, [0, 2, 3]), (SWAP, [3])], ids=["recompute", "swap"])
def test_a_preemption_at_any_step_changes_nothing(expected, mode, numbers, overlap):
    """Each request is preempted at each step in turn; a budget of 16 makes some of these steps chunks of a prompt."""
    cases, preempted = 0, 0
    for number, step in itertools.product(numbers, range(16)):
        tokens, preemptions = run(
            preempt=[(step, str(number))], max_num_batched_tokens=16, block_size=8, async_scheduling=overlap, **mode
        )
        assert_same_tokens(tokens, expected, (number, step))
        cases, preempted = cases + 1, preempted + preemptions
    assert preempted > cases / 2


@pytest.mark.parametrize(("mode", "overlap"), [({}, False), ({}, True), (SWAP, True)], ids=["recompute", "overlap", "swap"])
@pytest.mark.parametrize("num_blocks", [24, 26, 28, 40, 44, 200])
def test_a_pool_that_runs_out_changes_nothing(expected, mode, num_blocks, overlap):
    options = {"num_gpu_blocks_override": num_blocks, "block_size": 2, "max_model_len": 48, **mode}
    tokens, preemptions = run(async_scheduling=overlap, **options)
    assert_same_tokens(tokens, expected)
    assert (preemptions > 0) == (num_blocks < 200)


@pytest.mark.parametrize("overlap", [False, True])
def test_everything_preempted_at_every_third_step_changes_nothing(expected, overlap):
    some = [(step, str(number)) for step in range(0, 60, 3) for number in range(len(PROMPTS))]
    tokens, preemptions = run(preempt=some, async_scheduling=overlap)
    assert_same_tokens(tokens, expected)
    assert preemptions > 8


def test_samples_of_one_request_differ_and_are_the_same_in_any_batch():
    alone, _ = run(n=3, max_num_seqs=1)
    together, _ = run(n=3, max_num_seqs=16, max_num_batched_tokens=64, async_scheduling=True)
    assert_same_tokens(together, alone)
    for number, samples in enumerate(alone):
        different = len({tuple(sample) for sample in samples})
        assert different == (1 if params_of(number).greedy else 3)


@pytest.mark.parametrize("overlap", [False, True])
def test_the_prefix_cache_and_sharing_change_nothing(overlap):
    """Prompts that begin alike, samples of one prompt, sent twice, with and without; a preemption at each step in turn."""
    stem = PROMPTS[3][:33]
    prompts = [stem + tail for tail in ([], [1], [2, 3], [4] * 9)]
    cases = 0

    def outputs(step=None, **options):
        engine = Engine(
            EngineArgs(
                model="tiny", dtype="float64", block_size=8, max_model_len=64, num_gpu_blocks_override=60,
                max_num_batched_tokens=24, max_num_seqs=8, async_scheduling=overlap, **options,
            )
        )  # fmt: skip
        if step is not None:
            for number in range(2 * len(prompts)):
                engine.scheduler.preempt_at(step, str(number))
        tokens = {}
        for repeat in range(2):
            for number, prompt in enumerate(prompts):
                params = SamplingParams(temperature=1, n=2, seed=number, max_tokens=5, ignore_eos=True)
                engine.add_request(str(repeat * len(prompts) + number), prompt, params)
            while engine.has_unfinished_requests():
                for output in engine.step():
                    if output.finished:
                        tokens[int(output.request_id)] = [sample.token_ids for sample in output.outputs]
                assert engine.audit() == []
        hits = engine.prefix_cache_stats.hits
        engine.close()
        return [tokens[number] for number in sorted(tokens)], hits

    plain, no_hits = outputs(enable_prefix_caching=False, step=None)
    assert no_hits == 0
    assert plain[:4] == plain[4:]
    for step in [None, *range(14)]:
        shared, hits = outputs(step)
        assert_same_tokens(shared, plain, step)
        assert hits > 0
        cases += len(shared)
    assert cases == 15 * 8


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("steps", range(1, 6))
def test_a_greedy_fork_goes_on_as_its_parent_does(steps, overlap):
    """The fork shares the parent's blocks; both write into copies or in place, and read the same keys and values."""
    engine = Engine(
        EngineArgs(model="tiny", dtype="float64", block_size=4, num_gpu_blocks_override=60, async_scheduling=overlap)
    )
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    engine.add_request("parent", PROMPTS[2], params)
    for _ in range(steps):
        engine.step()
    for name in ("first", "second"):
        engine.fork("parent", name, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    finished = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                finished[output.request_id] = output
        assert engine.audit() == []
    parent = PROMPTS[2] + finished["parent"].outputs[0].token_ids
    names = ("first", "second")
    whole = [finished[name].prompt_token_ids + finished[name].outputs[0].token_ids for name in names]
    assert_same_tokens(whole, [parent[: len(token_ids)] for token_ids in whole])
    assert [len(finished[name].outputs[0].token_ids) for name in names] == [8, 8]
    assert engine.scheduler.kv.num_free_blocks == 60
    engine.close()
