"""The definitions of what moves keys and values, against plain loops; none of them changes what it is given."""

import math

import torch
from asserts import assert_same

from refimpl.kernels import reference


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def pool(seed):
    return random(3, 4, 2, 6, seed=seed)


def test_write_kv_puts_each_token_into_its_slot_and_padded_rows_nowhere():
    key, value, k_cache, v_cache = random(4, 2, 6), random(4, 2, 6, seed=1), pool(2), pool(3)
    before = k_cache.clone(), v_cache.clone()
    slots = [11, -1, 0, 6]
    written = reference.write_kv(key, value, k_cache, v_cache, torch.tensor(slots))
    expected = k_cache.clone(), v_cache.clone()
    for t, slot in enumerate(slots):
        if slot >= 0:
            expected[0][slot // 4][slot % 4] = key[t]
            expected[1][slot // 4][slot % 4] = value[t]
    for got, wanted, cache, old in zip(written, expected, (k_cache, v_cache), before, strict=True):
        assert_same(got, wanted)
        assert_same(cache, old, "an argument was changed")


def test_turn_and_write_kv_turns_queries_and_keys_and_no_values():
    query, key, value, k_cache, v_cache = random(2, 4, 6), random(2, 2, 6), random(2, 2, 6, seed=1), pool(2), pool(3)
    angles = random(10, 3, seed=4)
    tables, positions = (angles.cos(), angles.sin()), torch.tensor([7, 2])
    turned, keys, values = reference.turn_and_write_kv(
        query, key, value, positions, *tables, k_cache, v_cache, torch.tensor([5, 9])
    )
    for t, (position, slot) in enumerate(((7, 5), (2, 9))):
        for source, target in ((query[t], turned[t]), (key[t], keys[slot // 4][slot % 4])):
            for h in range(len(source)):
                for i in range(3):
                    c, s = math.cos(angles[position, i]), math.sin(angles[position, i])
                    a, b = source[h, i].item(), source[h, i + 3].item()
                    assert math.isclose(target[h, i].item(), a * c - b * s, rel_tol=1e-12, abs_tol=1e-13)
                    assert math.isclose(target[h, i + 3].item(), b * c + a * s, rel_tol=1e-12, abs_tol=1e-13)
        assert_same(values[slot // 4][slot % 4], value[t])


def test_blocks_are_copied_gathered_and_scattered():
    pools = torch.stack((pool(0), pool(1)))
    before = pools.clone()
    copied = reference.copy_blocks(pools, torch.tensor([2]), torch.tensor([0]))
    staging = reference.gather_blocks(pools, torch.tensor([2, 1]))
    scattered = reference.scatter_blocks(pools, torch.tensor([1, 0]), staging)
    assert_same(pools, before, "an argument was changed")
    for p in range(2):
        for block, source in enumerate((2, 1, 2)):
            assert_same(copied[p, block], before[p, source])
        for i, block in enumerate((2, 1)):
            assert_same(staging[i, p], before[p, block])
        for block, source in enumerate((1, 2, 2)):
            assert_same(scattered[p, block], before[p, source])


def test_add_rms_norm_norms_the_sum_and_gives_it():
    x, residual, weight = random(3, 8), random(3, 8, seed=1), random(8, seed=2)
    normed, new_residual = reference.add_rms_norm(x, residual, weight, 1e-5)
    assert_same(new_residual, x + residual)
    assert_same(normed, reference.rms_norm(x + residual, weight, 1e-5))
