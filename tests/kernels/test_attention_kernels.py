"""What the attention kernels promise beside their values: splits, boundaries, lengths that change under a fixed grid."""

import math

import pytest
import torch
from asserts import assert_close, assert_same
from kernel_device import DEVICE

from refimpl.errors import RefimplError
from refimpl.kernels import attention_cases, reference
from refimpl.kernels.attention_tiles import Target
from refimpl.kernels.flash_attention import cut_queries, flash_attention, plan_prefill
from refimpl.kernels.paged_attention import paged_attention, plan_decode
from refimpl.kernels.split_plan import WAVES, SplitPlan, count_items, plan_splits

SMALL = Target(capability=80, num_sms=2)
LARGE = Target(capability=80, num_sms=64)
"""So many multiprocessors that contexts are split as far as they may be."""
T4 = Target(capability=75, num_sms=64)


def ints(*values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def inputs_of(dtype=torch.float32, seed=0, **shape):
    """Inputs by name, and the definition's answer in float64."""
    inputs = attention_cases.make_case({"n": 1, "D": 16, "B": 8, **shape}, dtype, DEVICE, seed).inputs
    wide = {k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in inputs.items()}
    return inputs, attention_cases.twin(**wide)


def decode(inputs, target=SMALL, max_seqlen_q=None, out=None, plan=None):
    rest = dict(inputs)
    window = rest.pop("window")
    bound = max_seqlen_q or rest.pop("max_seqlen_q")
    rest.pop("max_seqlen_q", None)
    query, cache = rest["query"], rest["k_cache"]
    lengths = (rest["cu_seqlens_q"], rest["seqused_k"])
    heads = (query.shape[1], cache.shape[2], query.shape[2])
    most = rest["block_table"].shape[1] * cache.shape[1]
    plan = plan or plan_decode(*heads, query.dtype, *lengths, bound, most, target, window)
    out = torch.full(query.shape, math.nan, dtype=query.dtype, device=DEVICE) if out is None else out
    return paged_attention(**rest, plan=plan, out=out, target=target)


def prefill(inputs, query_lens, context_lens, **options):
    rest = {name: value for name, value in inputs.items() if name != "max_seqlen_q"}
    query = rest["query"]
    plan = plan_prefill(query.shape[2], query.dtype, query_lens, context_lens, DEVICE, target=SMALL, **options)
    return flash_attention(**rest, plan=plan, out=torch.full_like(query, math.nan), target=SMALL)


def close(got, expected, dtype=torch.float32):
    tolerance = attention_cases.TOLERANCES[dtype]
    looser = 2 if dtype == torch.bfloat16 else 1  # the interpreter cuts off where a GPU rounds
    assert_close(got, expected, looser * tolerance.rtol, looser * tolerance.atol, what="(token, head, dimension)")


# ---------------------------------------------------------------------- splits


@pytest.mark.parametrize("one_wave", [1, 5, 40])
@pytest.mark.parametrize("contexts", [[0, 1, 8, 9, 0], [1000, 3, 64, 0], [5] * 9, [0, 0], [4000, 17]])
def test_splits_cover_every_context_once_in_even_shares(contexts, one_wave):
    S, tile, most = len(contexts), 8, max(contexts) + 100
    plan = plan_splits(ints(*range(S + 1)), ints(*contexts), 1, most, tile, one_wave)
    rows, splits = plan.items.tolist(), plan.splits.tolist()
    assert len(rows) == count_items(S, most, tile, one_wave)
    used = 0
    for s, context in enumerate(contexts):
        first, count = splits[s]
        assert first == used
        own, used = rows[first : first + count], used + count
        assert [row[0] for row in own] == [s] * count
        assert [row[3] for row in own] == [count] * count
        edges = [row[1] for row in own] + [context]
        assert edges[0] == 0
        assert [row[2] for row in own] == edges[1:]
        tiles = [-(-(end - start) // tile) for _, start, end, _ in own]
        assert not tiles or (max(tiles) - min(tiles) <= 1 and min(tiles) > 0)
    assert all(row == [0, 0, 0, 0] for row in rows[used:])


def test_one_long_context_is_cut_into_one_wave():
    used = [int(plan_splits(ints(0, 1), ints(tiles * 8), 1, 10**6, 8, 10).splits[0, 1]) for tiles in (1, 3, 10, 20, 320)]
    assert used == [1, 1, 5, 10, 10]


@pytest.mark.parametrize(("sequences", "whole"), [(10, True), (11, False), (13, False), (20, True), (21, False)])
def test_sequences_that_fill_their_waves_stay_whole_and_others_are_cut(sequences, whole):
    """10 programs are a wave, and a context has 40 tiles."""
    plan = plan_splits(ints(*range(sequences + 1)), ints(*[320] * sequences), 1, 320, 8, 10)
    assert (plan.splits[:, 1] == 1).all() == whole
    assert plan.splits[:, 1].sum() <= WAVES * 10 + sequences


def test_a_sequence_of_too_many_queries_has_no_split():
    plan = plan_splits(ints(0, 1, 6, 8), ints(9, 30, 9), 2, 30, 8, 4)
    assert [count for _, count in plan.splits.tolist()] == [1, 0, 1]


# ---------------------------------------------------------------------- decode


@pytest.mark.parametrize(("Hq", "Hkv"), [(9, 3), (6, 1), (7, 1), (8, 8)])
def test_groups_of_heads_over_several_splits(Hq, Hkv):
    inputs, expected = inputs_of(torch.float16, S=1, L=140, Hq=Hq, Hkv=Hkv)
    close(decode(inputs, LARGE), expected, torch.float16)


def test_more_splits_than_are_merged_at_once(monkeypatch):
    monkeypatch.setattr("refimpl.kernels.paged_attention.SPLITS_AT_ONCE", 2)
    inputs, expected = inputs_of(torch.float16, S=1, L=140, Hq=9, Hkv=3)
    close(decode(inputs, LARGE), expected, torch.float16)


def test_a_split_that_early_queries_do_not_reach():
    """16 queries over 34 keys: the second split holds two keys, which the last two queries alone see."""
    inputs, expected = inputs_of(torch.float16, S=1, n=16, L=34, Hq=2, Hkv=1)
    plan = SplitPlan(items=torch.stack((ints(0, 0, 32, 2), ints(0, 32, 34, 2))), splits=ints(0, 2)[None], max_queries=16)
    close(decode(inputs, plan=plan), expected, torch.float16)


@pytest.mark.parametrize("B", [8, 32])
def test_lengths_around_blocks_by_vector_arithmetic(B):
    inputs, expected = inputs_of(torch.float16, S=6, L=70, Hq=3, Hkv=1, B=B, ragged=1)
    close(decode(inputs, T4), expected, torch.float16)
    assert inputs["seqused_k"][0] == 0
    assert_same(decode(inputs, T4)[0], torch.zeros(3, 16, dtype=torch.float16, device=DEVICE), "a padded row")


def test_sequences_with_more_queries_are_left_alone():
    inputs, expected = inputs_of(S=3, n=5, L=9, Hq=2, Hkv=1)
    inputs["cu_seqlens_q"] = ints(0, 2, 12, 15)  # 2, 10 and 3 queries
    out = torch.full_like(inputs["query"], 7.0)
    decode(inputs, max_seqlen_q=4, out=out)
    wide = [inputs[name].double() for name in ("query", "k_cache", "v_cache")]
    rest = [inputs[name] for name in ("block_table", "cu_seqlens_q", "seqused_k", "softmax_scale")]
    rest[2] = ints(9, 10, 9)  # the definition wants a key for each query; these rows are not compared
    expected = reference.paged_attention(*wide, *rest)
    close(out[[0, 1, 12, 13, 14]], expected[[0, 1, 12, 13, 14]])
    assert (out[2:12] == 7).all()


def test_lengths_change_in_place_under_one_grid():
    """What a CUDA graph does: the same buffers and grids, planned and computed again for other lengths."""
    inputs, _ = inputs_of(S=3, L=40, Hq=2, Hkv=1)
    for lengths in ([40, 40, 40], [1, 0, 33], [7, 8, 9]):
        inputs["seqused_k"].copy_(ints(*lengths))
        wide = {k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in inputs.items()}
        close(decode(inputs, LARGE), attention_cases.twin(**wide))


def test_scores_of_thousands_do_not_overflow():
    inputs, _ = inputs_of(S=1, L=40, Hq=2, Hkv=1)
    inputs["query"] *= 60
    inputs["k_cache"] *= 60
    wide = {k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in inputs.items()}
    # Differences of scores of some 10⁴ carry float32's rounding of 10⁻³, so weights are right to about 1 in 100.
    assert_close(decode(inputs, LARGE), attention_cases.twin(**wide), rtol=0.02, atol=0.05)


# ---------------------------------------------------------------------- prefill


def test_tiles_of_queries_longest_walk_first():
    assert cut_queries([5, 1, 3], [5, 9, 100], 1, 2) == [(2, 2), (2, 0), (0, 4), (0, 2), (0, 0)]
    assert cut_queries([], [], 0, 2) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_at_the_end_of_a_context(dtype):
    """33 queries, one more than a float32 tile, at the end of 50 keys; served beside a decode that is left alone."""
    inputs, expected = inputs_of(dtype, S=1, n=33, L=50, Hq=3, Hkv=1)
    got = prefill(inputs, [33], [50])
    close(got, expected, dtype)
    assert prefill(inputs, [33], [50], serve_above=33).isnan().all()


# ---------------------------------------------------------------------- windows


@pytest.mark.parametrize(
    ("target", "window"), [(SMALL, 1), (SMALL, 40), (LARGE, 95), (T4, 8)], ids=["one", "whole", "split", "T4"]
)
def test_decodes_within_a_window(window, target):
    """Three queries at the end of contexts around the window and of 140 keys, in splits that begin where windows do."""
    inputs, expected = inputs_of(torch.float16, S=6, n=3, L=140, Hq=2, Hkv=1, ragged=1, window=window)
    close(decode(inputs, target), expected, torch.float16)


@pytest.mark.parametrize(("window", "one_wave"), [(1, 5), (8, 1), (9, 40), (100, 5)])
def test_splits_cover_what_windows_reach_over(window, one_wave):
    contexts, queries, tile = [1000, 3, 64, 0, 101], [2, 1, 1, 1, 2], 8
    starts = ints(0, *torch.tensor(queries).cumsum(0).tolist())
    plan = plan_splits(starts, ints(*contexts), 2, 1100, tile, one_wave, window)
    rows, used = plan.items.tolist(), 0
    assert len(rows) == count_items(len(contexts), min(1100, window + 1 + tile - 1), tile, one_wave)
    for s, (context, n) in enumerate(zip(contexts, queries, strict=True)):
        first, count = plan.splits[s].tolist()
        own, used = rows[first : first + count], used + count
        edges = [row[1] for row in own] + [context]
        assert edges[0] == max(context - n - window + 1, 0) // tile * tile
        assert [row[2] for row in own] == edges[1:]
        assert all(start < end for _, start, end, _ in own)
    assert all(row == [0, 0, 0, 0] for row in rows[used:])


@pytest.mark.parametrize("window", [15, 33])
def test_chunks_within_a_window_read_nothing_before_it(window):
    """70 queries, three tiles of 32, at the end of 90 keys; keys that no window reaches are NaN."""
    inputs, expected = inputs_of(S=1, n=70, L=90, Hq=1, Hkv=1, window=window)
    unread = max(0, 20 - window + 1) // 16 * 16  # the first tile of keys that is read
    for cache in (inputs["k_cache"], inputs["v_cache"]):
        cache[inputs["block_table"][0, : unread // 8].long()] = math.nan
    close(prefill(inputs, [70], [90]), expected)


# ---------------------------------------------------------------------- what cannot be read


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"query": torch.zeros(1, 2, 16, dtype=torch.float64)},
            "float64, torch.float32, torch.float32; all must be the same",
        ),
        ({"query": torch.zeros(1, 3, 16)}, "query heads a multiple of key/value heads"),
        ({"query": torch.zeros(1, 2, 8)}, "and head sizes equal"),
        ({"k_cache": torch.zeros(3, 12, 2, 16), "v_cache": torch.zeros(3, 12, 2, 16)}, r"block size \(12\) must be a power"),
        ({"v_cache": torch.zeros(3, 8, 2, 32, device=DEVICE)[..., ::2]}, "the caches' must be equal, and every last one 1"),
    ],
    ids=["dtype", "heads", "head size", "block size", "strides"],
)
def test_what_cannot_be_read_is_refused(change, said):
    inputs, _ = inputs_of(S=1, L=9, Hq=2, Hkv=2)
    inputs |= {name: value.to(DEVICE) for name, value in change.items()}
    with pytest.raises(RefimplError, match=said):
        decode(inputs)
