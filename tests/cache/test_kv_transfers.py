"""Blocks between the cache and the swap space: each arrives whole, in every layer, in any order; others are left alone."""

import random

import pytest
import torch

from refimpl.cache.kv_cache import KVCache
from refimpl.models.tiny import tiny


@pytest.fixture
def cache():
    config = tiny(num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=4).config
    cache = KVCache(config, 12, 4, torch.float32, torch.device("cpu"), num_host_blocks=9)
    for number, tensor in enumerate(tensors(cache.layers) + cache.host_blocks.pools):
        tensor.copy_(torch.rand(tensor.shape, generator=torch.Generator().manual_seed(number)))
    return cache


def tensors(layers):
    return [tensor for layer in layers for tensor in (layer.k, layer.v)]


def random_pairs(seed):
    rng = random.Random(seed)
    count = rng.randint(1, 9)
    return list(zip(rng.sample(range(1, 13), count), rng.sample(range(1, 10), count), strict=True))


@pytest.mark.parametrize(
    "pairs",
    [
        [],
        [(3, 7)],
        [(2, 1), (3, 2), (4, 3)],
        [(4, 3), (3, 2), (2, 1)],
        [(1, 2), (2, 3), (3, 4), (4, 5), (8, 6), (9, 7), (10, 8), (11, 9)],
    ]
    + [random_pairs(seed) for seed in range(5)],
    ids=str,
)
def test_blocks_go_out_and_come_in_whole(cache, pairs):
    device, host = ([tensor.clone() for tensor in pools] for pools in (tensors(cache.layers), cache.host_blocks.pools))
    for device_id, host_id in pairs:
        for source, target in zip(device, host, strict=True):
            target[host_id] = source[device_id]
    cache.swap_out(pairs)
    assert all(map(torch.equal, cache.host_blocks.pools, host))
    assert all(map(torch.equal, tensors(cache.layers), device))

    moved = [(host_id, 13 - device_id) for device_id, host_id in pairs]
    for host_id, device_id in moved:
        for source, target in zip(host, device, strict=True):
            target[device_id] = source[host_id]
    cache.swap_in(moved)
    assert all(map(torch.equal, tensors(cache.layers), device))
    assert all(map(torch.equal, cache.host_blocks.pools, host))


def test_copies_are_made_in_every_layer(cache):
    expected = [tensor.clone() for tensor in tensors(cache.layers)]
    for tensor in expected:
        tensor[[3, 12, 1]] = tensor[[7, 7, 2]]
    cache.copy_blocks([(7, 3), (7, 12), (2, 1)])
    cache.copy_blocks([])
    assert all(map(torch.equal, tensors(cache.layers), expected))
