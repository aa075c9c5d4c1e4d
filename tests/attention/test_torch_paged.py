"""The torch backend against the definition, in float64: shapes, boundaries, tiles, tables, and memory nobody wrote."""

import math

import numpy as np
import pytest
import torch
from asserts import assert_close, assert_same
from attention_case import TOLERANCES, Case
from hypothesis import given, settings
from hypothesis import strategies as st

from refimpl.attention import TorchPagedAttention
from refimpl.attention.torch_paged import QUERIES_PER_TILE, cut_tiles, group_tiles
from refimpl.cache.kv_cache import LayerKV

HEADS = [(9, 3), (6, 1), (7, 1), (8, 8), (4, 2)]


@pytest.mark.parametrize("D", [64, 80, 96, 128, 256])
@pytest.mark.parametrize(("Hq", "Hkv"), HEADS)
def test_head_sizes_and_groupings(Hq, Hkv, D):
    """Decodes, a chunk in the middle of a context, and a whole prompt in one step."""
    Case([(1, 33), (16, 64), (5, 5), (1, 1)], Hq, Hkv, D, B=16).check()


@pytest.mark.parametrize("B", [1, 8, 16, 32])
@pytest.mark.parametrize("queries", [1, 16])
def test_lengths_around_blocks(queries, B):
    for context in sorted({1, B - 1, B, B + 1, 64, 300}):
        if context >= queries:
            Case([(queries, context)], 6, 2, 16, B).check()
            Case([(queries, context), (1, 2), (queries, context)], 6, 2, 16, B).check()


@pytest.mark.parametrize("filling", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("B", [1, 8, 16])
def test_memory_nobody_wrote_is_not_read(B, filling):
    """The same step with the rest of the pool at zero and at NaN or infinity: the same bits."""
    lens = [(1, 1), (1, 7), (1, B + 1), (1, 64), (16, 41), (3, 3), (1, 2 * B)]
    clean, dirty = (Case(lens, 4, 2, 16, B, torch.float32, f).run() for f in (0.0, filling))
    assert_same(dirty, clean)


@pytest.mark.parametrize("lens", [(1, 1), (1, 50), (1, 64), (16, 50), (33, 33), (300, 330)])
def test_a_lone_sequence_whose_blocks_follow_each_other_is_read_where_it_lies(monkeypatch, lens):
    """The same bits as from blocks that are gathered, and nothing is copied."""
    gathered = []
    index_select = torch.index_select
    monkeypatch.setattr(torch, "index_select", lambda *args, **kwargs: gathered.append(1) or index_select(*args, **kwargs))
    cases = [Case([lens], 6, 2, 16, 16, torch.float32, in_order=in_order) for in_order in (True, False)]
    in_place, scattered = cases
    in_place.query, in_place.key, in_place.value = scattered.query, scattered.key, scattered.value
    for block, other in zip(in_place.table[0], scattered.table[0], strict=True):
        for mine, theirs in ((in_place.cache.k, scattered.cache.k), (in_place.cache.v, scattered.cache.v)):
            mine[block] = theirs[other]
    first = in_place.run()
    assert not gathered
    assert_same(first, scattered.run())
    in_place.check()


@pytest.mark.parametrize("dtype", list(TOLERANCES))
def test_dtypes(dtype):
    lens = [(1, 100), (1, 3), (1, 300), (16, 64), (40, 40), (1, 257)]
    Case(lens, 6, 2, 64, 16, dtype).check()
    Case(lens, 9, 3, 64, 16, dtype, seed=1).check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_large_scores_do_not_overflow(dtype):
    """Scores of thousands: the softmax subtracts the largest, in float32."""
    case = Case([(1, 40), (8, 24)], 4, 2, 64, 8, dtype)
    case.query, case.key = case.query * 60, case.key * 60
    got = case.run()
    assert got.isfinite().all()
    # Differences of scores of some 10⁴ carry float32's rounding of 10⁻³, so weights are right to about 1 in 100.
    assert_close(got, case.expected(), rtol=0.02, atol=0.05)


@pytest.mark.parametrize("queries", [QUERIES_PER_TILE, QUERIES_PER_TILE + 1, 600])
def test_prompts_of_several_tiles(queries):
    Case([(queries, queries)], 2, 1, 8, 16).check()
    Case([(1, 40), (queries, queries + 77), (2, 2)], 2, 1, 8, 16).check()


def test_odd_strides():
    """Keys, values and queries as slices of one fused product, and a cache whose blocks do not lie end to end."""
    case = Case([(3, 20), (1, 9)], 4, 2, 16, 8)
    plain = case.run()
    fused = torch.cat((case.query.flatten(1), case.key.flatten(1), case.value.flatten(1)), dim=1)
    query, key, value = fused.split((64, 32, 32), dim=1)
    both = torch.full((case.cache.k.shape[0], 2, 8, 2, 32), math.nan, dtype=torch.float64)[..., ::2]
    strided = LayerKV(both[:, 0], both[:, 1])
    before = Case([(3, 20), (1, 9)], 4, 2, 16, 8).cache
    strided.k.copy_(before.k)
    strided.v.copy_(before.v)
    step = TorchPagedAttention(case.scale).begin_step(case.metadata)
    step.write(strided, key.unflatten(1, (2, 16)), value.unflatten(1, (2, 16)))
    assert_same(step.attend(strided, query.unflatten(1, (4, 16))), plain)


def test_write_touches_its_slots_alone():
    case = Case([(3, 20), (1, 9), (1, 16)], 4, 2, 16, 8, filling=0.5)
    expected = [case.cache.k.clone(), case.cache.v.clone()]
    for row, slot in enumerate(case.slot_mapping.tolist()):
        expected[0][slot // 8, slot % 8] = case.key[row]
        expected[1][slot // 8, slot % 8] = case.value[row]
    case.run()
    assert_same(case.cache.k, expected[0], "keys")
    assert_same(case.cache.v, expected[1], "values")


def test_attend_changes_nothing():
    case = Case([(3, 20), (1, 9)], 4, 2, 16, 8, filling=0.5)
    step = TorchPagedAttention(case.scale).begin_step(case.metadata)
    before = [x.clone() for x in (case.query, case.cache.k, case.cache.v, case.table)]
    step.attend(case.cache, case.query)
    for old, new in zip(before, (case.query, case.cache.k, case.cache.v, case.table), strict=True):
        assert_same(new, old)


def test_a_sequence_is_the_same_in_any_company():
    """Alone and in a batch, up to the order of sums, which padding to a longer context may change."""
    lens = [(1, 30), (1, 50), (4, 29), (1, 58), (4, 4), (1, 200)]
    together = Case(lens, 4, 2, 16, 8)
    rows = together.run().split([n for n, _ in lens])
    for s, (n, context) in enumerate(lens):
        alone = Case([(n, context)], 4, 2, 16, 8)
        first = sum(m for m, _ in lens[:s])
        alone.cache, alone.table = together.cache, together.table[s : s + 1]
        alone.query = together.query[first : first + n]
        assert_close(rows[s], alone.expected(), *TOLERANCES[torch.float64])


def test_steps_of_any_size_share_one_backend():
    """The scratch memory of a large step holds its leavings when a small one follows."""
    backend = TorchPagedAttention(16**-0.5)
    for seed, lens in enumerate([[(1, 300), (300, 300)], [(1, 1)], [(1, 17), (1, 9)], [(2, 90)]]):
        Case(lens, 4, 2, 16, 8, seed=seed, filling=math.inf).check(backend)


def test_a_sequence_of_nan_spoils_no_other():
    case = Case([(1, 20), (1, 21), (1, 22)], 4, 2, 16, 8)
    clean = case.run()
    for position in range(21):
        case.cache.v[case.table[1, position // 8], position % 8] = math.nan
    case.value[1] = case.query[1] = math.nan
    dirty = case.run()
    assert dirty[1].isnan().all()
    assert_same(dirty[[0, 2]], clean[[0, 2]])


lens = st.integers(1, 40).flatmap(lambda context: st.tuples(st.integers(1, context), st.just(context)))


@settings(max_examples=60, deadline=None)
@given(
    lens=st.lists(lens, min_size=1, max_size=6),
    heads=st.sampled_from([(1, 1), *HEADS]),
    D=st.sampled_from([2, 4, 10]),
    B=st.integers(1, 20),
    filling=st.sampled_from([math.nan, math.inf, 0.0]),
    seed=st.integers(0, 2**20),
)
def test_any_step(lens, heads, D, B, filling, seed):
    Case(lens, *heads, D, B, filling=filling, seed=seed).check()


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 3000).flatmap(lambda c: st.tuples(st.integers(1, c), st.just(c))), min_size=1, max_size=20))
def test_tiles_cover_every_query_once(lens):
    tiles = cut_tiles([n for n, _ in lens], [context for _, context in lens])
    spans = zip(tiles.first_tokens.tolist(), tiles.num_queries.tolist(), strict=True)
    covered = [token for start, count in spans for token in range(start, start + count)]
    assert covered == list(range(sum(n for n, _ in lens)))
    first_token = 0
    for s, (n, context) in enumerate(lens):
        own = tiles[tiles.sequences == s]
        # A tile's last query is its first token's distance from the sequence's end, so it sees exactly up to itself.
        ends = own.first_tokens + own.num_queries
        assert (own.contexts == context - (first_token + n - ends)).all()
        first_token += n
    groups = group_tiles(tiles)
    assert sorted(token for group in groups for token in group.first_tokens) == tiles.first_tokens.tolist()
    for group in groups:
        assert (group.first_tokens == np.sort(group.first_tokens)).all()
        assert len(set(group.num_queries)) == 1
        assert group.contexts.max() <= 2 * group.contexts.min()
