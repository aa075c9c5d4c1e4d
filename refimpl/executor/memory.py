"""How many blocks fit: bytes to blocks, as arithmetic. Nothing here touches a device."""

from __future__ import annotations

import contextlib
import ctypes
import math

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


ENOUGH = 4
"""A cache that the memory alone would size stops at this many times the most tokens that can run at once."""


def activation_bytes_per_token(model: ModelConfig, bytes_per_value: int) -> int:
    """Of a step, by the tensors of its widest layer: the feed-forward one, with its residual and its norm. A first guess."""
    return bytes_per_value * (4 * model.hidden_size + 3 * model.intermediate_size)


def enough_bytes(each: int, block_size: int, max_num_seqs: int, max_model_len: int) -> int:
    """Bytes beyond which a larger cache would only cost: room for every slot at its longest, and more for prefixes.

    ``each``: bytes of a block.
    """
    blocks = ENOUGH * max_num_seqs * -(-max_model_len // block_size)
    return (blocks + 1) * each


def num_blocks(cache: CacheConfig, each: int, available_bytes: int) -> int:
    """Usable blocks of the KV cache, of ``each`` bytes. ``available_bytes`` counts unless the options fix number or bytes.

    (What a GPU has left is judged before, with all sums: :mod:`refimpl.executor.memory_advice`.)

    Raises:
        OutOfMemoryError: not even one block and the null block fit.

    """
    if cache.num_gpu_blocks_override is not None:
        return cache.num_gpu_blocks_override
    available = cache.kv_cache_memory_bytes if cache.kv_cache_memory_bytes is not None else available_bytes
    count = available // each - 1  # the null block
    if count < 1:
        raise OutOfMemoryError(
            f"{max(0, available):,} bytes are left for the KV cache; a block of {cache.block_size} tokens takes {each:,}, "
            f"and two are the least: set {_least(cache, 2 * each)}",
            available=available,
            block=each,
        )
    return count


def _least(cache: CacheConfig, needed: int) -> str:
    """The option that gives a cache its bytes, with a value that does."""
    if cache.kv_cache_memory_bytes is not None:
        return f"kv_cache_memory_bytes={needed}"
    return f"cpu_kvcache_space={math.ceil(1e6 * needed / GIB) / 1e6:g}, in GiB, or use a smaller dtype or model"


def give_back_to_the_system() -> None:
    """Have the C library hand its free memory to the system: glibc keeps blocks of a few MiB, as weights are, for later."""
    with contextlib.suppress(OSError, AttributeError, TypeError):  # another C library has no malloc_trim
        ctypes.CDLL(None).malloc_trim(0)
