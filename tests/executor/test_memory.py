"""Bytes to blocks, as arithmetic, with Llama-3-70B's numbers."""

import pytest

from refimpl.config import GIB, CacheConfig, ModelConfig, RopeConfig
from refimpl.errors import OutOfMemoryError
from refimpl.executor import memory

LLAMA_70B = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=128_256,
    hidden_size=8192,
    intermediate_size=28_672,
    num_hidden_layers=80,
    num_attention_heads=64,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=8192,
    rms_norm_eps=1e-5,
    rope=RopeConfig(theta=500_000.0),
    tie_word_embeddings=False,
)
BLOCK = memory.block_bytes(LLAMA_70B, 16, 2)


def cache(**changes):
    options = {
        "block_size": 16,
        "num_gpu_blocks_override": None,
        "kv_cache_memory_bytes": None,
        "gpu_memory_utilization": 0.9,
        "cpu_kvcache_space": None,
    }
    return CacheConfig(**(options | changes))


def test_the_numbers_of_llama_3_70b():
    assert LLAMA_70B.kv_bytes_per_token(2) == 327_680
    assert memory.block_bytes(LLAMA_70B, 16, 2) == 5 * 2**20
    assert 4096 * LLAMA_70B.kv_bytes_per_token(2) == 1.25 * GIB
    assert LLAMA_70B.num_parameters == 70_553_706_496


def test_the_null_block_is_one_more_than_the_count():
    assert memory.num_blocks(cache(), BLOCK, available_bytes=5 * 2**20 * 11) == 10
    with pytest.raises(OutOfMemoryError, match="two are the least") as caught:
        memory.num_blocks(cache(), BLOCK, available_bytes=5 * 2**20 * 2 - 1)
    assert caught.value.numbers["block"] == 5 * 2**20
    assert "set cpu_kvcache_space=0.009766, in GiB" in str(caught.value)
    assert memory.num_blocks(cache(), BLOCK, int(0.009766 * GIB)) == 1, "the value that it names does"
    with pytest.raises(OutOfMemoryError, match="set kv_cache_memory_bytes=10485760"):
        memory.num_blocks(cache(kv_cache_memory_bytes=100), BLOCK, 0)


def test_options_come_before_what_is_available():
    assert memory.num_blocks(cache(num_gpu_blocks_override=7), BLOCK, 0) == 7
    assert memory.num_blocks(cache(kv_cache_memory_bytes=GIB), BLOCK, 0) == 1024 // 5 - 1


def test_a_cpus_share():
    assert memory.cpu_cache_bytes(cache(), 100 * GIB) == 4 * GIB
    assert memory.cpu_cache_bytes(cache(), 8 * GIB) == 2 * GIB
    assert memory.cpu_cache_bytes(cache(cpu_kvcache_space=1.5), 8 * GIB) == 1.5 * GIB


def test_enough_is_four_times_all_slots_at_their_longest():
    assert memory.enough_bytes(BLOCK, 16, max_num_seqs=2, max_model_len=33) == (4 * 2 * 3 + 1) * 5 * 2**20
