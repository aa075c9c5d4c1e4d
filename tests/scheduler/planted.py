"""Faults to plant in the scheduler and the cache: each is a function of a ``pytest.MonkeyPatch``."""

import copy
import dataclasses

import msgspec
import pytest

from refimpl.cache import BlockPool, KVCacheManager, PrefixCache
from refimpl.cache.shadow import ShadowExecutor
from refimpl.cache.swap import SwapSpace
from refimpl.errors import RefimplError
from refimpl.scheduler import Scheduler
from refimpl.scheduler.plan import StepPlan

ALARMS = (AssertionError, LookupError, RefimplError)
"""What the audits raise, or a part that finds its books broken before they do."""


def handed_out_twice(patch):
    original = BlockPool.allocate

    def allocate(self, count):
        block_ids = original(self, count)
        if block_ids:
            self.free(block_ids[:1])
        return block_ids

    patch.setattr(BlockPool, "allocate", allocate)


def freed_while_shared(patch):
    original = KVCacheManager.free

    def free(self, sequence_id):
        block_ids = self.table(sequence_id)
        released = original(self, sequence_id)
        self.pool.free([block_id for block_id in block_ids if block_id not in released])
        return released

    patch.setattr(KVCacheManager, "free", free)


def given_back_twice(patch):
    original = BlockPool.free

    def free(self, block_ids):
        block_ids = list(block_ids)
        original(self, block_ids)
        original(self, block_ids[:1])

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
    original = KVCacheManager.allocate

    def take(self, count):
        return self.pool.allocate(min(count, self.pool.num_free))

    def allocate(self, *args):
        allocation = original(self, *args)
        if allocation is not None:
            return allocation
        with pytest.MonkeyPatch.context() as inner:  # too few blocks: what there is will do
            inner.setattr(KVCacheManager, "num_free_blocks", self.num_blocks)
            inner.setattr(KVCacheManager, "_take", take)
            return original(self, *args)

    patch.setattr(KVCacheManager, "allocate", allocate)


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
        return tuple(msgspec.structs.replace(made, source=made.source % 3 + 1) for made in copies)

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
        before = copy.deepcopy(vars(self))
        block_ids = original(self, count)
        vars(self).update(before)  # given back, and still findable
        return block_ids

    patch.setattr(PrefixCache, "evict", evict)


def null_block_given_away(patch):
    original = BlockPool.allocate

    def allocate(self, count):
        block_ids = original(self, count)
        return [0, *block_ids[1:]] if block_ids else block_ids

    patch.setattr(BlockPool, "allocate", allocate)


def token_in_flight_drawn_again(patch):
    original = Scheduler._preempt

    def preempt(self, sequence, *args, **kwargs):
        original(self, sequence, *args, **kwargs)
        sequence.num_tokens_in_flight = 0

    patch.setattr(Scheduler, "_preempt", preempt)


def swap_without_a_copy(patch):
    original = KVCacheManager.swap_out

    def swap_out(self, sequence_id):
        swapped = original(self, sequence_id)
        return swapped and dataclasses.replace(swapped, transfers=swapped.transfers[1:])

    patch.setattr(KVCacheManager, "swap_out", swap_out)


def swaps_what_others_use(patch):
    def to_move(self, block_ids, ref_counts):
        return list(block_ids)

    patch.setattr(SwapSpace, "to_move", to_move)


def swap_in_to_other_blocks(patch):
    original = KVCacheManager.swap_in

    def swap_in(self, *arguments):
        back = original(self, *arguments)
        return back and (back[0], [(host, target) for (host, _), (_, target) in zip(back[1], back[1][::-1], strict=True)])

    patch.setattr(KVCacheManager, "swap_in", swap_in)


def host_blocks_leak(patch):
    patch.setattr(KVCacheManager, "drop_swapped", lambda self, sequence_id: [])


def swap_out_after_the_write(patch):
    original = ShadowExecutor.run

    def run(self, output):
        out, output = output.swapped_out, msgspec.structs.replace(output, swapped_out=())
        drawn = original(self, output)
        self._copy(self._memory, self._host_memory, out)
        return drawn

    patch.setattr(ShadowExecutor, "run", run)


PLANTED = [
    swap_without_a_copy,
    swaps_what_others_use,
    swap_in_to_other_blocks,
    host_blocks_leak,
    swap_out_after_the_write,
    handed_out_twice,
    freed_while_shared,
    given_back_twice,
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
