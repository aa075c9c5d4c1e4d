"""The prefix cache: what is found again, what is not, what is evicted, and that keys are not believed alone."""

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sharing_support import Driver

from refimpl.cache import KVCacheManager, PrefixCache
from refimpl.cache.chained_hash import block_key, root_key

DEPTHS = pytest.mark.parametrize("depth", [0, 1])


def prompt(length, start=1):
    return [100 + start * 1000 + i for i in range(length)]


def computed_for(driver, tokens, **options):
    """Tokens that a request's prompt costs, run alone."""
    before = driver.computed
    request = driver.add(tokens, max_tokens=1, **options)
    driver.run()
    assert request.finished
    return driver.computed - before


@pytest.mark.parametrize(("length", "again"), [(4, 4), (8, 4), (9, 1), (3, 3), (5, 1), (12, 4)])
def test_a_hit_never_covers_the_whole_prompt(length, again):
    driver = Driver()
    assert computed_for(driver, prompt(length)) == length
    for _ in range(3):
        assert computed_for(driver, prompt(length)) == again


def test_a_later_prompt_computes_only_what_differs():
    driver = Driver(num_blocks=220, block_size=16, max_num_batched_tokens=2048, max_model_len=3000)
    assert computed_for(driver, prompt(1500) + prompt(50, 2)) == 1550
    assert computed_for(driver, prompt(1500) + prompt(50, 3)) == 62
    assert (driver.cache.stats.queries, driver.cache.stats.hits) == (3100, 1488)


@DEPTHS
def test_twins_of_one_step_share(depth):
    driver = Driver(depth=depth, max_num_batched_tokens=64)
    driver.add(prompt(17))
    driver.add(prompt(17))
    driver.add(prompt(12) + prompt(5, 2))
    first = driver.step()
    assert first.batch.num_new_tokens == (17, 1, 5)
    driver.run()


def test_tokens_that_were_generated_are_found_by_the_next_turn():
    driver = Driver()
    request = driver.add(prompt(6), max_tokens=10)
    driver.run()
    so_far = prompt(6) + request.sequences[0].output_token_ids
    full = (len(so_far) - 1) // 4 * 4  # the last token was drawn, not computed
    assert computed_for(driver, so_far + prompt(5, 2)) == len(so_far) + 5 - full


def test_a_block_that_is_used_again_forgets_what_it_held():
    driver = Driver(num_blocks=2)
    assert computed_for(driver, prompt(7)) == 7
    assert computed_for(driver, prompt(7, start=2)) == 7
    assert computed_for(driver, prompt(7)) == 7
    assert len(driver.cache) <= 2


def test_other_tokens_are_a_miss_even_if_every_key_collides():
    driver = Driver()
    driver.cache.index.make_key = lambda parent, tokens: b"always the same"
    assert computed_for(driver, [65] * 9) == 9
    assert computed_for(driver, [321] * 9) == 9
    assert computed_for(driver, [65] * 9) <= 9


def test_equal_sums_and_repeated_blocks_are_told_apart():
    driver = Driver()
    assert computed_for(driver, [65] * 4 + [1]) == 5
    assert computed_for(driver, [321] * 4 + [1]) == 5
    assert computed_for(driver, [65] * 8 + [1]) == 5
    assert computed_for(driver, [1, 65, 65, 65, 65]) == 5


def test_salts_do_not_share_and_a_salt_is_no_tag():
    driver = Driver()
    assert computed_for(driver, prompt(9), salt="a") == 9
    assert computed_for(driver, prompt(9), salt="b") == 9
    assert computed_for(driver, prompt(9)) == 9
    assert computed_for(driver, prompt(9), salt="a") == 1
    keys = [
        root_key(None),
        root_key(""),
        root_key("X"),
        root_key(None, "X"),
        root_key("X", "X"),
        root_key("XX"),
        root_key("", "X"),
    ]
    assert len(set(keys)) == len(keys)


def test_keys_are_the_same_in_every_process():
    code = "from refimpl.cache.chained_hash import *; print(block_key(root_key('s', 't'), [1, 2, 3]).hex())"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert other == block_key(root_key("s", "t"), [1, 2, 3]).hex()


def test_reset_forgets_everything_and_running_requests_go_on():
    driver = Driver()
    computed_for(driver, prompt(9))
    driver.add(prompt(9))
    driver.step()
    driver.kv.reset_prefix_cache()
    driver.check()
    assert len(driver.cache) == 0
    driver.run()
    assert computed_for(driver, prompt(9)) == 9


def test_what_is_computed_again_after_a_preemption_is_no_hit():
    driver = Driver()
    driver.add(prompt(9), max_tokens=8)
    driver.add(prompt(9, start=2), max_tokens=8)
    for step in range(2, 9, 2):
        driver.scheduler.preempt_at(step, "0")
        driver.scheduler.preempt_at(step, "1")
    driver.run()
    assert any(output.preempted for output in driver.outputs)
    assert driver.cache.stats.hits == 0
    assert driver.cache.stats.queries == 18


@DEPTHS
def test_a_twin_is_not_left_reading_what_nobody_computes(depth):
    """Two equal prompts and a pool that runs out on the third request of the step."""
    driver = Driver(num_blocks=7, max_num_batched_tokens=64, depth=depth)
    driver.add(prompt(5), max_tokens=12)
    driver.step()
    driver.add(prompt(9, start=2), max_tokens=6)
    driver.add(prompt(9, start=2), max_tokens=6)
    driver.add(prompt(9, start=3), max_tokens=6)
    driver.run()


def chain(cache, count, root=b"root", first_block=1):
    key = root
    for index in range(count):
        key = cache.publish(first_block + index, key, [index])
    return [first_block + index for index in range(count)]


def test_leaves_go_before_roots_and_the_least_recently_used_first():
    cache = PrefixCache()
    old, new = chain(cache, 3, b"old", 1), chain(cache, 2, b"new", 10)
    for block_id in old + new:  # released root first: the order of use alone would evict roots
        cache.release(block_id)
    assert cache.evict(5) == [3, 2, 1, 11, 10]


def test_a_hit_makes_a_block_recent():
    cache = PrefixCache()
    for number, root in enumerate((b"a", b"b", b"c"), start=1):
        chain(cache, 1, root, number)
        cache.release(number)
    cache.acquire([1])
    cache.release(1)
    assert cache.evict(2) == [2, 3]
    assert cache.stats.evictions == 2


def test_a_parent_without_children_in_the_cache_can_go_while_a_child_is_used():
    cache = PrefixCache()
    chain(cache, 2)
    cache.release(1)
    assert cache.num_evictable == 1
    assert cache.evict(1) == [1]
    cache.publish(7, b"root", [0])  # the same content comes back in another block
    cache.release(2)
    cache.release(7)
    assert sorted(cache.evict(2)) == [2, 7]


def test_the_heap_does_not_grow_with_hits():
    cache = PrefixCache()
    blocks = chain(cache, 5)
    for block_id in blocks:
        cache.release(block_id)
    for _ in range(1000):
        cache.acquire(blocks)
        for block_id in reversed(blocks):
            cache.release(block_id)
    assert len(cache.index._heap) < 200
    assert cache.evict(5) == [5, 4, 3, 2, 1]


def test_a_hit_is_taken_before_anything_is_evicted_for_the_rest():
    kv = KVCacheManager(4, 4, PrefixCache())
    first = kv.admit(0, 8)
    kv.publish(0, list(range(8)), 8)
    kv.free(0)
    kv.admit(1, 8)
    kv.free(1)
    assert kv.pool.num_free == 2
    cached = kv.match_prefix([*range(8), 9, 9, 9, 9, 9], None)
    assert cached == first.new_blocks
    assert sorted(kv.admit(2, 16, cached).new_blocks) == [3, 4]
    assert kv.admit(3, 1) is None


def test_a_refused_admission_changes_nothing():
    kv = KVCacheManager(4, 4, PrefixCache())
    kv.admit(0, 8)
    kv.publish(0, list(range(8)), 8)
    kv.free(0)
    before = kv.snapshot({})
    cached = kv.match_prefix([*range(8), 9], None)
    assert kv.admit(1, 17, cached) is None
    assert kv.snapshot({}) == before


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_lookups_find_the_longest_prefix_that_is_published(data):
    """Against a plain dictionary of prefixes."""
    cache, model, block_size = PrefixCache(), {}, 2
    for block_id in range(1, 15):
        tokens = data.draw(st.lists(st.integers(0, 1), min_size=2, max_size=8))
        depth = data.draw(st.integers(0, len(tokens) // 2 - 1))
        key = root_key(None)
        known = all(tuple(tokens[: 2 * (i + 1)]) in model for i in range(depth))
        if not known:
            continue
        for i in range(depth):
            key = block_key(key, tokens[2 * i : 2 * i + 2])
        cache.publish(block_id, key, tokens[2 * depth : 2 * depth + 2])
        model.setdefault(tuple(tokens[: 2 * depth + 2]), block_id)
    probe = data.draw(st.lists(st.integers(0, 1), min_size=0, max_size=9))
    expected = []
    for i in range(len(probe) // 2):
        if tuple(probe[: 2 * i + 2]) not in model:
            break
        expected.append(model[tuple(probe[: 2 * i + 2])])
    assert cache.lookup(root_key(None), probe, block_size, 9) == expected
