"""The block manager against a plain model of itself, by random calls; and the auditor against planted faults."""

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from refimpl.cache import BlockPool, BlockTable, KVCacheManager, audit


class CacheMachine(RuleBasedStateMachine):
    """allocate and free in any order, beside a dict of lengths; the books are audited after each call."""

    @initialize(num_blocks=st.integers(1, 12), block_size=st.integers(1, 5))
    def make(self, num_blocks, block_size):
        self.kv = KVCacheManager(num_blocks, block_size)
        self.lengths = {}
        self.owned = {}

    @rule(sequence_id=st.integers(0, 4), more=st.integers(1, 14))
    def allocate(self, sequence_id, more):
        before = msgspec.structs.asdict(self.kv.snapshot(self.lengths))
        length = self.lengths.get(sequence_id, 0) + more
        needed = self.kv.blocks_missing(sequence_id, length)
        allocation = self.kv.allocate(sequence_id, self.lengths.get(sequence_id, 0), length)
        if allocation is None:
            assert needed > before["num_blocks"] - sum(map(len, before["tables"].values()))
            assert msgspec.structs.asdict(self.kv.snapshot(self.lengths)) == before, "a refusal changes nothing"
        else:
            assert len(allocation.new_blocks) == needed
            assert allocation.copies == []
            self.lengths[sequence_id] = length
            self.owned.setdefault(sequence_id, []).extend(allocation.new_blocks)

    @precondition(lambda self: self.lengths)
    @rule(data=st.data())
    def free(self, data):
        sequence_id = data.draw(st.sampled_from(sorted(self.lengths)))
        assert sorted(self.kv.free(sequence_id)) == sorted(self.owned.pop(sequence_id))
        del self.lengths[sequence_id]

    @rule(sequence_id=st.integers(5, 9))
    def free_unknown(self, sequence_id):
        assert self.kv.free(sequence_id) == []

    @invariant()
    def books_are_right(self):
        if hasattr(self, "kv"):
            snapshot = self.kv.snapshot(self.lengths)
            assert audit(snapshot) == []
            assert {s: list(b) for s, b in snapshot.tables.items()} == self.owned
            assert self.kv.num_free_blocks == self.kv.num_blocks - sum(map(len, self.owned.values()))
            for sequence_id, length in self.lengths.items():
                assert 0 <= len(self.kv.table(sequence_id)) * self.kv.block_size - length < self.kv.block_size


TestCache = CacheMachine.TestCase
TestCache.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_blocks_are_numbered_from_one_and_the_null_block_is_never_handed_out():
    pool = BlockPool(3)
    assert pool.allocate(3) == [1, 2, 3]
    assert pool.allocate(1) is None
    assert pool.num_free == 0


def test_an_allocation_is_all_or_nothing():
    pool = BlockPool(3)
    assert pool.allocate(4) is None
    assert pool.num_free == 3


def test_a_double_free_is_an_error():
    pool = BlockPool(2)
    [block_id] = pool.allocate(1)
    pool.free([block_id])
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free([block_id])


def test_a_table_maps_positions_to_slots():
    table = BlockTable(4)
    table.append([7, 2])
    assert [table.slot(position) for position in (0, 3, 4, 7)] == [28, 31, 8, 11]
    assert [table.blocks_missing(tokens) for tokens in (0, 8, 9, 17)] == [0, 0, 1, 3]


@pytest.fixture
def clean():
    """Two sequences of 6 and 3 tokens in a pool of 6 blocks of 4."""
    kv = KVCacheManager(6, 4)
    kv.allocate(0, 0, 6)
    kv.allocate(1, 0, 3)
    return kv.snapshot({0: 6, 1: 3})


def test_a_clean_snapshot_has_no_violations(clean):
    assert audit(clean) == []


@pytest.mark.parametrize(
    ("name", "change", "expected"),
    [
        (
            "handed out twice",
            lambda s: {"tables": s.tables | {1: s.tables[0][:1]}},
            "reference count 1, but is in the tables of [0, 1]",
        ),
        ("freed while owned", lambda s: {"free_ids": (*s.free_ids, s.tables[0][0])}, "is in the free list and in the table"),
        ("double free", lambda s: {"free_ids": (*s.free_ids, s.free_ids[0])}, "in the free list 2 times"),
        ("leaked", lambda s: {"free_ids": s.free_ids[1:]}, "is lost"),
        ("null block given away", lambda s: {"tables": s.tables | {1: (0,)}}, "the null block is in the table"),
        ("cached while owned", lambda s: {"cached_ids": s.tables[0][:1]}, "is in the prefix cache and in the table"),
        ("free and cached", lambda s: {"cached_ids": s.free_ids[:1]}, "is free and cached"),
        ("a reference too many", lambda s: {"ref_counts": s.ref_counts | {s.tables[0][0]: 2}}, "has reference count 2"),
        ("a reference without a table", lambda s: {"ref_counts": s.ref_counts | {s.free_ids[0]: 1}}, "tables of []"),
        ("twice in one table", lambda s: {"tables": s.tables | {1: s.tables[1] * 2}}, "twice in one table"),
        ("null block free", lambda s: {"free_ids": (*s.free_ids, 0)}, "the null block is free"),
        ("unknown block", lambda s: {"tables": s.tables | {1: (99,)}}, "does not exist"),
        ("blocks of one that does not run", lambda s: {"num_computed_tokens": {0: 6}}, "does not run but has 1"),
        ("too few blocks", lambda s: {"num_computed_tokens": {0: 9, 1: 3}}, "tokens need 3"),
        ("too many blocks", lambda s: {"num_computed_tokens": {0: 4, 1: 3}}, "tokens need 1"),
        ("no table at all", lambda s: {"num_computed_tokens": {0: 6, 1: 3, 2: 5}}, "sequence 2 has 0 blocks"),
    ],
)
def test_the_auditor_sees(clean, name, change, expected):
    violations = audit(msgspec.structs.replace(clean, **change(clean)))
    assert any(expected in violation.text for violation in violations), violations
