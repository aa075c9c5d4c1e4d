"""Attention by tiles, as it is recorded: the definition's answer, the kernels' walks, and counts that formulas give too."""

import math

import pytest
import torch

from refimpl.attention import tiles
from refimpl.attention.tiles import bytes_asked_for, bytes_standard, decode_walks, flops_done, prefill_walks, trace_attention
from refimpl.errors import RefimplError
from refimpl.kernels import attention_cases


def step(n, L, G=1, B=4, dtype=torch.float64):
    shape = {"S": 1, "n": n, "L": L, "Hq": G, "Hkv": 1, "D": 4, "B": B}
    return attention_cases.make_case(shape, dtype, torch.device("cpu"), 0).inputs


def follow(inputs, walks):
    table, scale = inputs["block_table"][0].tolist(), inputs["softmax_scale"]
    pools = inputs["k_cache"][:, :, 0], inputs["v_cache"][:, :, 0]
    return trace_attention(inputs["query"], *pools, table, int(inputs["seqused_k"][0]), scale, walks)


CASES = [
    (16, 1, 16, prefill_walks(16, 16, 4, 4)),
    (8, 1, 22, prefill_walks(8, 22, 4, 8)),
    (5, 1, 13, prefill_walks(5, 13, 4, 4)),
    (7, 1, 7, prefill_walks(7, 7, 16, 2)),
    (1, 4, 44, decode_walks(1, 4, 44, 3, 16, 8)),
    (3, 2, 33, decode_walks(3, 2, 33, 4, 8, 8)),
    (16, 2, 34, decode_walks(16, 2, 34, 2, 16, 32)),  # the second split holds nothing that the first queries see
    (1, 1, 5, decode_walks(1, 1, 5, 99, 16, 4)),
]
each = pytest.mark.parametrize(("n", "G", "L", "walks"), CASES)


@each
def test_the_answer_is_the_definition_whatever_the_tiles(n, G, L, walks):
    inputs = step(n, L, G)
    output = torch.tensor(follow(inputs, walks).output, dtype=torch.float64).view(n, G, -1)
    torch.testing.assert_close(output, attention_cases.twin(**inputs), rtol=1e-12, atol=1e-13)


@each
def test_each_state_is_that_of_the_keys_so_far(n, G, L, walks):
    inputs = step(n, L, G)
    trace = follow(inputs, walks)
    ids = inputs["block_table"][0].long()
    keys, values = (inputs[name][ids].flatten(0, 1)[:L, 0] for name in ("k_cache", "v_cache"))
    scores = inputs["query"].flatten(0, 1) @ keys.T * inputs["softmax_scale"]
    for tile in trace.tiles:
        walk = walks[tile.walk]
        end = min(tile.first_key + walk.tile_n, walk.end_key)
        before = -math.inf
        for index, row in enumerate(range(walk.first_row, walk.end_row)):
            seen = scores[row, walk.first_key : min(end, trace.position_of(row) + 1)]
            expected = seen.max().item() if len(seen) else -math.inf
            assert tile.row_max[index] == pytest.approx(expected)
            weights = torch.exp(seen - expected)
            assert tile.row_sum[index] == pytest.approx(weights.sum().item())
            average = weights @ values[walk.first_key : walk.first_key + len(seen)]
            assert tile.attended[index] == pytest.approx(average.tolist())
            kept = scores[row, walk.first_key : min(tile.first_key, trace.position_of(row) + 1)]
            before = kept.max().item() if len(kept) else -math.inf
            factor = math.exp(before - expected) if expected > -math.inf else 0.0
            assert tile.rescale[index] == pytest.approx(factor)
        block_size = trace.block_size
        assert tile.block_ids == trace.block_table[tile.first_key // block_size : -(-end // block_size)]


@each
def test_only_tiles_that_a_row_does_not_see_whole_are_masked(n, G, L, walks):
    trace = follow(step(n, L, G), walks)
    for tile in trace.tiles:
        hidden = any(score == -math.inf for row in tile.scores for score in row)
        assert tile.masked or not hidden
    assert len(trace.tiles) == sum(walk.num_tiles for walk in walks)


def test_shares_of_a_merge_come_to_one_and_a_prefill_has_none():
    trace = follow(step(1, 44, 4), decode_walks(1, 4, 44, 3, 16, 8))
    assert [sum(shares) for shares in zip(*trace.merge.shares, strict=True)] == pytest.approx([1.0] * 4)
    assert follow(step(8, 22), prefill_walks(8, 22, 4, 8)).merge is None


def test_a_row_that_saw_nothing_in_a_split_has_no_share_of_it():
    trace = follow(step(16, 34, 2), decode_walks(16, 2, 34, 2, 32, 32))
    assert [trace.merge.lse[1][row] == -math.inf for row in range(32)] == [True] * 28 + [False] * 4
    assert trace.merge.shares[1][:28] == (0.0,) * 28


@pytest.mark.parametrize(("n", "context"), [(5, 4), (1, 13)])
def test_a_context_that_cannot_be_is_refused(n, context):
    query, pool = torch.zeros(n, 1, 4), torch.zeros(4, 4, 4)
    with pytest.raises(RefimplError, match=f"context is {context} with {n} queries and 3 blocks of 4"):
        trace_attention(query, pool, pool, [1, 2, 3], context, 0.5, prefill_walks(1, 1, 4, 4))


def test_bytes_are_those_of_the_tiles_that_are_visited():
    n, M, D = 1_024, 128, 64
    walks = prefill_walks(n, n, M, 32)
    loaded = sum(2 * D * min(walk.tile_n, walk.end_key - key) for walk in walks for key, _ in walk.tiles())
    assert bytes_asked_for(walks, D, 2) == 2 * (loaded + 2 * D * n) == 4 * D * (n * (n + M) // (2 * M) + n)
    assert bytes_asked_for(decode_walks(1, 4, 1_000, 1, 16, 64), D, 2) == 4 * D * (1_000 + 4)
    splits = decode_walks(1, 4, 1_000, 3, 16, 64)
    assert bytes_asked_for(splits, D, 2) == 2 * D * (2 * 1_000 + 3 * 4 + 4) + 3 * 4 * 2 * 4 * (D + 1)
    assert bytes_standard(3, 5, D, 2) == 4 * D * 8 + 16 * 15
    assert flops_done(walks, D) == 4 * D * M * 32 * sum(range(4, 33, 4))


# ---------------------------------------------------------------------- beside the kernels themselves


@pytest.fixture
def visited(monkeypatch):
    """(first key, masked) of each tile that a kernel takes in, by the interpreter."""
    triton = pytest.importorskip("triton")
    if not triton.knobs.runtime.interpret:
        pytest.skip("on a GPU a kernel's calls cannot be watched")
    from refimpl.kernels import attention_tiles

    found, take_tile = [], attention_tiles.take_tile

    def spy(*args, **options):
        found.append((int(args[5]), options["MASKED"]))
        return take_tile(*args, **options)

    monkeypatch.setattr(attention_tiles, "take_tile", spy)
    return found


def tiles_of(walks):
    return sorted(tile for walk in walks for tile in walk.tiles())


@pytest.mark.parametrize(("n", "L"), [(40, 40), (33, 70), (3, 35), (20, 20)])
def test_the_prefill_kernel_walks_as_told(visited, n, L):
    from refimpl.kernels.attention_specs import launch_prefill, make_prefill_case
    from refimpl.kernels.flash_attention import prefill_tiles

    shape = {"S": 1, "n": n, "L": L, "Hq": 1, "Hkv": 1, "D": 16, "B": 8}
    case = make_prefill_case(shape, torch.float32, torch.device("cpu"), 0)
    launch_prefill(**case.inputs, **case.out)
    cut = prefill_tiles(80, 16, torch.float32)
    assert sorted(visited) == tiles_of(prefill_walks(n, L, cut.tile_m, cut.tile_n))


@pytest.mark.parametrize(("n", "L"), [(1, 150), (3, 70), (1, 64)])
def test_the_decode_kernel_walks_as_told(visited, n, L):
    from refimpl.kernels.attention_specs import launch_decode, make_decode_case
    from refimpl.kernels.attention_tiles import INTERPRETER
    from refimpl.kernels.paged_attention import decode_tiles, plan_decode

    shape = {"S": 1, "n": n, "L": L, "Hq": 4, "Hkv": 1, "D": 16, "B": 8}
    case = make_decode_case(shape, torch.float32, torch.device("cpu"), 0)
    inputs = case.inputs
    launch_decode(**inputs, **case.out)
    lengths = inputs["cu_seqlens_q"], inputs["seqused_k"]
    plan = plan_decode(4, 1, 16, torch.float32, *lengths, n, -(-L // 8) * 8)
    cut = decode_tiles(INTERPRETER.capability, 16, 4 * n, torch.float32)
    splits = int(plan.splits[0, 1])
    assert sorted(visited) == tiles_of(decode_walks(n, 4, L, splits, cut.tile_m, cut.tile_n))


def test_one_tile_is_the_softmax_itself():
    scores, values = torch.randn(3, 5, dtype=torch.float64), torch.randn(5, 2, dtype=torch.float64)
    nothing = tiles._start(torch.zeros(3, 2, dtype=torch.float64))
    row_max, row_sum, attended, rescale = tiles.take_tile(*nothing, scores, values)
    torch.testing.assert_close(attended / row_sum[:, None], scores.softmax(1) @ values)
    assert (row_max.tolist(), rescale.tolist()) == (scores.amax(1).tolist(), [0.0] * 3)
