"""The proof: random use never breaks the books, and every planted fault is seen."""

import contextlib

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from sharing_support import Driver

from refimpl.cache import BlockPool, KVCacheManager, PrefixCache
from refimpl.errors import PromptError
from refimpl.scheduler import Scheduler
from refimpl.scheduler.plan import StepPlan

EXAMPLES, STEPS = 220, 50
"""Their product is about the number of calls: over 10,000."""


class SchedulerMachine(RuleBasedStateMachine):
    """Prompts that begin alike, samples, forks, aborts and preemptions in tiny pools; three levels of audit at each call."""

    @initialize(
        num_blocks=st.integers(3, 14),
        block_size=st.integers(1, 5),
        depth=st.integers(0, 1),
        slots=st.integers(1, 5),
        budget=st.integers(5, 20),
        prefix_cache=st.booleans(),
    )
    def make(self, num_blocks, block_size, depth, slots, budget, prefix_cache):
        limits = {"max_num_seqs": slots, "max_num_batched_tokens": budget}
        self.driver = Driver(num_blocks, block_size, depth, prefix_cache, **limits)

    @rule(
        stem=st.integers(0, 9),
        tail=st.lists(st.integers(1, 2), min_size=0, max_size=3),
        max_tokens=st.integers(1, 9),
        n=st.integers(1, 3),
        salt=st.sampled_from([None, "x"]),
    )
    def add(self, stem, tail, max_tokens, n, salt):
        prompt = [3] * stem + tail or [4]
        room = self.driver.scheduler.config.max_model_len - len(prompt)
        with contextlib.suppress(PromptError):
            self.driver.add(prompt, max_tokens=max(1, min(max_tokens, room)), n=n, salt=salt)

    def live(self):
        return [s for r in self.driver.requests.values() for s in r.sequences if not s.finished]

    @precondition(lambda self: self.live())
    @rule(data=st.data(), max_tokens=st.integers(1, 6))
    def fork(self, data, max_tokens):
        with contextlib.suppress(PromptError):
            self.driver.fork(data.draw(st.sampled_from(self.live())), max_tokens)

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def abort(self, data):
        self.driver.abort(data.draw(st.sampled_from(self.live())).request)

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def preempt_soon(self, data):
        sequence = data.draw(st.sampled_from(self.live()))
        self.driver.scheduler.preempt_at(self.driver.scheduler.step, sequence.request.request_id)

    @rule(count=st.integers(1, 4))
    def step(self, count):
        for _ in range(count):
            self.driver.step()

    @rule()
    def reset(self):
        self.driver.kv.reset_prefix_cache()
        self.driver.check()

    def teardown(self):
        if hasattr(self, "driver"):
            self.driver.run()


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=EXAMPLES, stateful_step_count=STEPS, deadline=None)


def workload(depth):
    """Enough of everything that each fault has its chance."""
    driver = Driver(num_blocks=12, block_size=4, depth=depth, max_num_seqs=4, max_num_batched_tokens=24)
    for round_number in range(6):
        stem = [3] * 6 + [round_number % 2] * 3
        driver.add(stem, n=3, max_tokens=8)
        driver.add([5, round_number + 1] * 4, max_tokens=9)
        for _ in range(3):
            driver.step()
        running = list(driver.scheduler.running)
        if running:
            driver.fork(running[0], max_tokens=6)
            if round_number % 2:
                driver.scheduler.preempt_at(driver.scheduler.step, running[-1].request.request_id)
        for _ in range(2):
            driver.step()
        driver.abort(driver.requests[str(len(driver.requests) - 1)])
    return driver.run()


@pytest.mark.parametrize("depth", [0, 1])
def test_the_workload_of_the_planted_faults_is_clean_without_them(depth):
    driver = workload(depth)
    assert driver.copies
    assert driver.cache.stats.hits
    assert driver.cache.stats.evictions
    assert any(output.preempted for output in driver.outputs)
    assert any(output.forks for output in driver.outputs)


def handed_out_twice(patch):
    original = BlockPool.allocate

    def allocate(self, count):
        block_ids = original(self, count)
        if block_ids:
            self._free.append(block_ids[0])
        return block_ids

    patch.setattr(BlockPool, "allocate", allocate)


def freed_while_shared(patch):
    def free(self, sequence_id):
        table = self._tables.pop(sequence_id, None)
        self._keys.pop(sequence_id, None)
        block_ids = table.block_ids[::-1] if table else []
        for block_id in block_ids:
            self._ref_counts[block_id] = 0
        self.pool.free(block_id for block_id in block_ids if self.pool._taken[block_id])
        return block_ids

    patch.setattr(KVCacheManager, "free", free)


def double_free(patch):
    original = BlockPool.free

    def free(self, block_ids):
        block_ids = list(block_ids)
        original(self, block_ids)
        self._free.extend(block_ids[:1])

    patch.setattr(BlockPool, "free", free)


def fork_without_a_reference(patch):
    original = KVCacheManager.fork

    def fork(self, parent_id, child_id):
        block_ids = original(self, parent_id, child_id)
        for block_id in block_ids:
            self._ref_counts[block_id] -= 1
        return block_ids

    patch.setattr(KVCacheManager, "fork", fork)


def leak(patch, method):
    """The table is forgotten, its blocks are not given back."""
    original = getattr(Scheduler, method)

    def leaking(self, *args, **kwargs):
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(KVCacheManager, "free", lambda kv, s: kv._tables.pop(s, None) and [])
            return original(self, *args, **kwargs)

    patch.setattr(Scheduler, method, leaking)


def leak_on_preemption(patch):
    leak(patch, "_preempt")


def leak_on_abort(patch):
    leak(patch, "abort")


def partial_allocation_kept(patch):
    original = BlockPool.allocate
    patch.setattr(KVCacheManager, "num_free_blocks", property(lambda self: self.num_blocks))

    def take(self, count):
        return original(self.pool, min(count, self.pool.num_free)) or []

    patch.setattr(KVCacheManager, "_take", take)


def copy_keeps_the_old_reference(patch):
    original = KVCacheManager.allocate

    def allocate(self, *args):
        allocation = original(self, *args)
        for _, source, _ in allocation.copies if allocation else ():
            self._ref_counts[source] += 1
        return allocation

    patch.setattr(KVCacheManager, "allocate", allocate)


def never_copies(patch):
    original = KVCacheManager.allocate

    def allocate(self, sequence_id, computed, upto):
        return original(self, sequence_id, -(-computed // self.block_size) * self.block_size, upto)

    patch.setattr(KVCacheManager, "allocate", allocate)


def frozen_with(change):
    original = StepPlan.freeze

    def freeze(self, *args):
        output = original(self, *args)
        return msgspec.structs.replace(output, copies=change(output.copies))

    return freeze


def copies_after_the_write(patch):
    late = []

    def delay(copies):
        late.append(copies)
        return late[-2] if len(late) > 1 else ()

    patch.setattr(StepPlan, "freeze", frozen_with(delay))


def copies_the_wrong_block(patch):
    def wrong(copies):
        return tuple(msgspec.structs.replace(copy, source=copy.source % 12 + 1) for copy in copies)

    patch.setattr(StepPlan, "freeze", frozen_with(wrong))


def stale_num_computed_tokens(patch):
    original = Scheduler._match_prefix

    def match(self, sequence):
        blocks = original(self, sequence)
        return blocks if not sequence.num_preemptions else _Longer(blocks)

    class _Longer(list):
        def __len__(self):
            return super().__len__() + 1

    patch.setattr(Scheduler, "_match_prefix", match)


def cached_block_handed_out(patch):
    original = PrefixCache.evict

    def evict(self, count):
        by_key, by_block = dict(self._by_key), dict(self._by_block)
        block_ids = original(self, count)
        self._by_key, self._by_block = by_key, by_block  # given back, and still findable
        return block_ids

    patch.setattr(PrefixCache, "evict", evict)


def null_block_given_away(patch):
    original = BlockPool.__init__

    def init(self, num_blocks):
        original(self, num_blocks)
        self._free.appendleft(0)

    patch.setattr(BlockPool, "__init__", init)


def token_in_flight_drawn_again(patch):
    original = Scheduler._preempt

    def preempt(self, sequence, *args, **kwargs):
        original(self, sequence, *args, **kwargs)
        sequence.num_tokens_in_flight = 0

    patch.setattr(Scheduler, "_preempt", preempt)


PLANTED = [
    handed_out_twice,
    freed_while_shared,
    double_free,
    fork_without_a_reference,
    leak_on_preemption,
    leak_on_abort,
    partial_allocation_kept,
    copy_keeps_the_old_reference,
    never_copies,
    copies_after_the_write,
    copies_the_wrong_block,
    stale_num_computed_tokens,
    cached_block_handed_out,
    null_block_given_away,
]


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_planted_fault_is_seen(plant, monkeypatch):
    plant(monkeypatch)
    with pytest.raises((AssertionError, KeyError, IndexError)):
        workload(depth=0)


def test_a_token_in_flight_that_is_drawn_again_is_seen(monkeypatch):
    def one_preemption():
        driver = Driver(depth=1)
        driver.add([3] * 6, max_tokens=9)
        driver.scheduler.preempt_at(2, "0")
        return driver.run()

    assert one_preemption().outputs[2].preempted
    token_in_flight_drawn_again(monkeypatch)
    with pytest.raises(AssertionError):
        one_preemption()
