"""Swap: a victim's blocks go to the host and come back, shared ones once; the books are audited at each call."""

import pytest
from sharing_support import Driver, expected_output

from refimpl import EngineArgs
from refimpl.cache import KVCacheManager, PrefixCache, audit
from refimpl.cache.swap import Place
from refimpl.errors import ConfigError
from refimpl.kernels.philox import ROOT_PATH, branch
from refimpl.scheduler.preemption import PreemptionCosts, choose_mode

SWAP = {"swap_space": 1.0, "preemption_mode": "swap"}


def manager(num_blocks=8, num_host_blocks=8, prefix_cache=None):
    return KVCacheManager(num_blocks, 4, prefix_cache, num_host_blocks=num_host_blocks)


def assert_clean(kv, computed):
    assert audit(kv.snapshot(computed)) == []


def test_all_blocks_of_a_sequence_go_and_come_back():
    kv = manager()
    [first, second, third] = kv.admit(0, 10).new_blocks
    swapped = kv.swap_out(0)
    assert [device for device, _ in swapped.transfers] == [first, second, third]
    assert sorted(swapped.released) == sorted([first, second, third])
    assert (kv.num_free_blocks, kv.swap.num_free) == (8, 5)
    assert_clean(kv, {0: 10})
    assert kv.blocks_to_resume(0, 10, 11) == 3
    allocation, transfers = kv.swap_in(0, 10, 11)
    assert [host for host, _ in transfers] == [host for _, host in swapped.transfers]
    assert allocation.new_blocks == [device for _, device in transfers] == list(kv.table(0))
    assert (kv.num_free_blocks, kv.swap.num_free) == (5, 8)
    assert_clean(kv, {0: 11})


def test_a_block_that_a_running_sequence_uses_stays_and_is_not_freed():
    kv = manager()
    blocks = list(kv.admit(0, 8).new_blocks)
    kv.fork(0, 1)
    kv.allocate(1, 8, 9)  # a block of its own behind the two that are shared
    swapped = kv.swap_out(1)
    assert len(swapped.transfers) == len(swapped.released) == 1
    assert kv.swap.places(1)[:2] == [Place(block, False) for block in blocks]
    assert kv.num_free_blocks == 6
    assert_clean(kv, {0: 8, 1: 9})
    kv.free(0)
    assert kv.num_free_blocks == 6  # still held
    assert_clean(kv, {1: 9})
    allocation, transfers = kv.swap_in(1, 9, 10)
    assert allocation.new_blocks[:2] == blocks
    assert len(transfers) == 1
    assert_clean(kv, {1: 10})


def test_a_block_shared_through_the_prefix_cache_stays_while_a_stranger_uses_it():
    """F37."""
    kv = manager(prefix_cache=PrefixCache())
    prompt = [1, 2, 3, 4, 5]
    kv.admit(0, 5)
    kv.publish(0, prompt, 5)
    hit = kv.match_prefix(prompt, None)
    kv.admit(1, 5, hit)
    free = kv.num_free_blocks
    swapped = kv.swap_out(0)
    assert len(swapped.transfers) == 1
    assert kv.num_free_blocks == free + 1
    assert kv.table(1)[0] == hit[0]
    assert_clean(kv, {0: 5, 1: 5})
    swapped = kv.swap_out(1)  # now nobody on the device uses it
    assert hit[0] in [device for device, _ in swapped.transfers]
    assert kv.num_free_blocks == 8
    assert_clean(kv, {0: 5, 1: 5})


def test_siblings_move_what_they_share_once_in_each_direction():
    kv = manager()
    kv.admit(0, 8)
    kv.fork(0, 1)
    kv.allocate(1, 8, 9)
    assert kv.swap_out(0).transfers == []  # the sibling still uses both
    assert len(kv.swap_out(1).transfers) == 3
    assert kv.swap.num_free == 5
    assert kv.swap.places(0) == kv.swap.places(1)[:2]
    assert_clean(kv, {0: 8, 1: 9})
    _, transfers = kv.swap_in(0, 8, 9)
    assert len(transfers) == 2
    assert [place.on_host for place in kv.swap.places(1)] == [False, False, True]
    assert list(kv.table(0)[:2]) == [place.block_id for place in kv.swap.places(1)[:2]]
    assert_clean(kv, {0: 9, 1: 9})
    _, transfers = kv.swap_in(1, 9, 10)
    assert len(transfers) == 1
    assert kv.table(0)[:2] == kv.table(1)[:2]
    assert kv.swap.num_free == kv.swap.num_blocks
    assert_clean(kv, {0: 9, 1: 10})


def test_a_half_full_block_that_came_back_shared_is_copied_before_it_is_written():
    kv = manager()
    kv.admit(0, 6)
    kv.fork(0, 1)
    kv.swap_out(0)
    kv.swap_out(1)
    assert kv.blocks_to_resume(0, 6, 7) == 3
    allocation, transfers = kv.swap_in(0, 6, 7)
    [(index, source, own)] = allocation.copies
    assert (index, source) == (1, transfers[1][1])
    assert kv.table(0)[1] == own
    assert kv.swap.places(1)[1] == Place(source, False)
    assert_clean(kv, {0: 7, 1: 6})


def test_a_call_without_room_changes_nothing():
    kv = manager(num_host_blocks=2)
    kv.admit(0, 12)
    before = kv.snapshot({0: 12})
    assert kv.swap_out(0) is None
    assert kv.snapshot({0: 12}) == before
    kv = manager(num_blocks=4)
    kv.admit(0, 12)
    kv.swap_out(0)
    kv.admit(1, 8)
    before = kv.snapshot({0: 12, 1: 8})
    assert kv.swap_in(0, 12, 13) is None
    assert kv.snapshot({0: 12, 1: 8}) == before


def test_dropping_gives_everything_back():
    kv = manager()
    kv.admit(0, 8)
    kv.fork(0, 1)
    kv.swap_out(1)
    kv.free(0)
    assert sorted(kv.drop_swapped(1)) == [1, 2]
    assert (kv.num_free_blocks, kv.swap.num_free) == (8, 8)
    assert kv.drop_swapped(1) == []


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("num_host_blocks", [1, 2, 30])
def test_work_goes_on_whatever_the_size_of_the_swap_space(num_host_blocks, depth):
    """F10: 8 device blocks, n=4."""
    driver = Driver(8, 4, depth=depth, num_host_blocks=num_host_blocks, **SWAP)
    driver.add([3] * 6, max_tokens=20, n=4)
    driver.add([5] * 6, max_tokens=20)
    driver.run()
    modes = {preemption.mode for output in driver.outputs for preemption in output.preempted}
    assert ("swap" in modes, "recompute" in modes) == {1: (True, True), 2: (True, True), 30: (True, False)}[num_host_blocks]


@pytest.mark.parametrize("depth", [0, 1])
def test_the_oldest_advances_and_swaps_are_bounded(depth):
    """F11: three long requests, room for one and a half."""
    driver = Driver(9, 4, depth=depth, num_host_blocks=30, **SWAP)
    prompts = [[3, i] for i in range(1, 99)]
    long = [prompt for prompt in prompts if len(expected_output(branch(ROOT_PATH, 0), prompt, 20)) == 20]
    for prompt in long[:3]:
        driver.add(prompt, max_tokens=20)
    while driver.scheduler.has_unfinished:
        oldest = min(driver.scheduler.sequences)
        assert oldest in driver.step().batch.sequence_ids or depth
    driver.run()
    assert 0 < sum(len(output.preempted) for output in driver.outputs) <= 6


@pytest.mark.parametrize("moment", ["at once", "a step later", "with its sibling"])
def test_a_swapped_request_can_be_aborted(moment):
    """F13."""
    driver = Driver(20, 4, num_host_blocks=30, **SWAP)
    request = driver.add([3] * 6, max_tokens=12, n=2)
    other = driver.add([5] * 6, max_tokens=12)
    for _ in range(4):
        driver.step()
    driver.preempt(request, "swap")
    if moment != "at once":
        driver.step()
        assert driver.kv.swap.tables or moment == "with its sibling"
    driver.abort(request)
    driver.run()
    assert other.finished


def prompt_of(answers, max_tokens=20):
    """A prompt whose answer has a length that is wanted; one shorter than ``max_tokens`` ends with a stop token."""
    prompts = ([3, 1 + i // 50, 1 + i % 50] * 3 for i in range(2_000))
    return next(p for p in prompts if answers(len(expected_output(branch(ROOT_PATH, 0), p, max_tokens))))


def test_a_swapped_request_that_shares_its_prompt_with_a_stranger_is_aborted_twice():
    """F13 and F37: what the stranger shares through the prefix cache is held, and stays when it is given up."""
    driver = Driver(20, 4, num_host_blocks=30, **SWAP)
    prompt = prompt_of(lambda length: length == 20)
    first, second = (driver.add(prompt, max_tokens=20) for _ in range(2))
    for _ in range(3):
        driver.step()
    driver.preempt(first, "swap")
    assert [p.mode for p in driver.step().preempted] == ["swap"]
    [gone], [alive] = first.sequences, second.sequences
    shared = driver.kv.table(alive.sequence_id)[:2]
    held = [place.block_id for place in driver.kv.swap.places(gone.sequence_id) if not place.on_host]
    assert held == list(shared)
    for _ in range(2):
        driver.abort(first)
        assert driver.kv.table(alive.sequence_id)[:2] == shared
    driver.run()
    assert len(alive.output_token_ids) == 20


def test_a_token_in_flight_stops_a_request_that_was_swapped_meanwhile():
    """The last token comes after its blocks went to the host: they are given back there, and nothing comes in again."""
    ended_while_swapped = 0
    for steps in range(1, 9):
        driver = Driver(20, 4, depth=1, num_host_blocks=30, **SWAP)
        request = driver.add(prompt_of(lambda length: length == 6), max_tokens=20)
        driver.add(prompt_of(lambda length: length == 20), max_tokens=20)
        [sequence] = request.sequences
        for _ in range(steps):
            driver.step()
        driver.preempt(request, "swap")
        outputs = [driver.step() for _ in range(3)]
        moved = any(output.swapped_out for output in outputs)
        came_back = any(output.swapped_in for output in outputs)
        ended_while_swapped += moved and not came_back and sequence.finish_reason == "stop"
        driver.run()
        assert sequence.finish_reason == "stop"
    assert ended_while_swapped == 1


def test_a_fork_of_a_swapped_request_computes_its_tokens_anew():
    driver = Driver(20, 4, num_host_blocks=30, max_num_seqs=2, **SWAP)
    request = driver.add([3] * 6, max_tokens=9)
    for _ in range(3):
        driver.step()
    driver.preempt(request, "swap")
    output = driver.step()
    assert output.swapped_out
    [parent] = request.sequences
    if not parent.finished:
        driver.fork(parent)
    driver.run()


def test_a_step_that_failed_leaves_nothing_swapped():
    driver = Driver(20, 4, num_host_blocks=30, **SWAP)
    request = driver.add([3] * 6, max_tokens=9)
    for _ in range(3):
        driver.step()
    driver.preempt(request, "swap")
    driver.step()
    driver.scheduler.drop_all_swapped()
    assert driver.kv.swap.num_free == driver.kv.swap.num_blocks
    driver.run()


def test_costs_say_the_length_from_which_swapping_is_cheaper():
    costs = PreemptionCosts(
        kv_bytes_per_token=1000,
        link_bytes_per_second=1e6,
        flops_per_token=1e6,
        attention_flops_per_token_pair=1e4,
        flops_per_second=1e9,
    )
    assert costs.swap_seconds(100) == pytest.approx(0.2)
    assert costs.recompute_seconds(1) == pytest.approx((1e6 + 1e4) / 1e9)
    assert costs.crossover == pytest.approx(2 * (2e6 - 1e6) / 1e4 - 1)
    assert costs.swap_seconds(199) == pytest.approx(costs.recompute_seconds(199))
    assert choose_mode("auto", costs, 198) == "recompute"
    assert choose_mode("auto", costs, 200) == "swap"
    assert choose_mode("auto", None, 10**6) == "recompute"
    assert choose_mode("swap", None, 1) == "swap"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"swap_space": -1}, "swap_space is -1"),
        ({"swap_space": float("nan")}, "swap_space is nan"),
        ({"swap_space": "4"}, "swap_space is '4'"),
        ({"preemption_mode": "swap"}, "swap_space is 0"),
        ({"preemption_mode": "both"}, "one of auto, swap, recompute"),
        ({"swap_space": 1, "kv_cache_manager": "contiguous"}, "for the paged cache"),
        ({"swap_space": 1, "enable_kv_cache": False}, "for the paged cache"),
    ],
)
def test_options_that_cannot_be_followed_are_refused(options, told):
    with pytest.raises(ConfigError, match=told):
        EngineArgs(**options)
