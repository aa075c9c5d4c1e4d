"""From options to a cache: which manager, which allocator, which prefix index."""

from __future__ import annotations

from refimpl.cache.allocators import choose_allocator
from refimpl.cache.contiguous import ContiguousKVCacheManager
from refimpl.cache.kv_cache_manager import KVCacheManager
from refimpl.cache.prefix_cache import PrefixCache
from refimpl.cache.prefix_index import choose_index
from refimpl.config import EngineArgs


def check_parts(args: EngineArgs) -> None:
    """Refuse wrong parts before a model is loaded for them.

    Raises:
        ConfigError: an allocator or index has no such name, or lacks a part.

    """
    choose_allocator(args.block_allocator)(1)
    choose_index(args.prefix_index)


def make_kv_cache_manager(args: EngineArgs, num_blocks: int, max_model_len: int, num_host_blocks: int = 0) -> KVCacheManager:
    """The manager of ``num_blocks`` blocks, and ``num_host_blocks`` to swap to, that the options ask for.

    Raises:
        ConfigError: an allocator or index of one's own lacks a part.

    """
    if args.kv_cache_manager == "contiguous":
        return ContiguousKVCacheManager(num_blocks, args.block_size, max_model_len)
    cached = args.enable_prefix_caching and args.enable_kv_cache
    prefix_cache = PrefixCache(choose_index(args.prefix_index)) if cached else None
    allocator = choose_allocator(args.block_allocator)(num_blocks)
    return KVCacheManager(num_blocks, args.block_size, prefix_cache, allocator, num_host_blocks)
