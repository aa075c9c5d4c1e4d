"""How many blocks fit: bytes to blocks, as arithmetic. Nothing here touches a device."""

from __future__ import annotations

import contextlib
import ctypes

from refimpl.config import GIB, CacheConfig, ModelConfig
from refimpl.errors import OutOfMemoryError


def block_bytes(model: ModelConfig, block_size: int, bytes_per_value: int) -> int:
    """Bytes of one block over all layers (Llama-3-70B, 16 tokens, 16 bits: 5 MiB)."""
    return block_size * model.kv_bytes_per_token(bytes_per_value)


def cpu_cache_bytes(cache: CacheConfig, free_bytes: int) -> int:
    """The KV cache's share of a CPU's memory: as asked, or min(4 GiB, a quarter of what is free)."""
    if cache.cpu_kvcache_space is not None:
        return int(cache.cpu_kvcache_space * GIB)
    return min(4 * GIB, free_bytes // 4)


def gpu_cache_bytes(cache: CacheConfig, total_bytes: int, used_bytes: int, activation_bytes: int) -> int:
    """What is left of the allowed share of a GPU after everything that is there, and the largest step's activations."""
    return int(total_bytes * cache.gpu_memory_utilization) - used_bytes - activation_bytes


ENOUGH = 4
"""A cache that the memory alone would size stops at this many times the most tokens that can run at once."""


def enough_bytes(model: ModelConfig, block_size: int, bytes_per_value: int, max_num_seqs: int, max_model_len: int) -> int:
    """Bytes beyond which a larger cache would only cost: room for every slot at its longest, and more for prefixes."""
    blocks = ENOUGH * max_num_seqs * -(-max_model_len // block_size)
    return (blocks + 1) * block_bytes(model, block_size, bytes_per_value)


def num_blocks(cache: CacheConfig, model: ModelConfig, bytes_per_value: int, available_bytes: int) -> int:
    """Usable blocks of the KV cache. ``available_bytes`` counts unless the options fix the number or the bytes.

    Raises:
        OutOfMemoryError: not even one block and the null block fit.

    """
    if cache.num_gpu_blocks_override is not None:
        return cache.num_gpu_blocks_override
    available = cache.kv_cache_memory_bytes if cache.kv_cache_memory_bytes is not None else available_bytes
    each = block_bytes(model, cache.block_size, bytes_per_value)
    count = available // each - 1  # the null block
    if count < 1:
        raise OutOfMemoryError(
            f"{max(0, available):,} bytes are left for the KV cache; a block of {cache.block_size} tokens takes {each:,}, "
            "and two are the least. Raise gpu_memory_utilization or cpu_kvcache_space, lower max_num_batched_tokens, "
            "or use a smaller dtype or model",
            available=available,
            block=each,
        )
    return count


def give_back_to_the_system() -> None:
    """Have the C library hand its free memory to the system: glibc keeps blocks of a few MiB, as weights are, for later."""
    with contextlib.suppress(OSError, AttributeError, TypeError):  # another C library has no malloc_trim
        ctypes.CDLL(None).malloc_trim(0)
