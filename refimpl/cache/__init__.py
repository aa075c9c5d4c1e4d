"""The KV cache's bookkeeping: which block belongs to whom. Pure Python, no torch; the tensors are in ``cache.kv_cache``."""

from refimpl.cache.allocators import BlockAllocator, FirstFreedFirst, LowestFirst
from refimpl.cache.auditor import Snapshot, Violation, audit
from refimpl.cache.block_pool import BlockPool
from refimpl.cache.block_table import BlockTable
from refimpl.cache.chained_hash import ChainedHash
from refimpl.cache.choose import make_kv_cache_manager
from refimpl.cache.contiguous import ContiguousKVCacheManager
from refimpl.cache.kv_cache_manager import Allocation, KVCacheManager
from refimpl.cache.prefix_cache import PrefixCache, PrefixCacheStats
from refimpl.cache.prefix_index import PrefixIndex
from refimpl.cache.token_tree import TokenTree

__all__ = [
    "Allocation",
    "BlockAllocator",
    "BlockPool",
    "BlockTable",
    "ChainedHash",
    "ContiguousKVCacheManager",
    "FirstFreedFirst",
    "KVCacheManager",
    "LowestFirst",
    "PrefixCache",
    "PrefixCacheStats",
    "PrefixIndex",
    "Snapshot",
    "TokenTree",
    "Violation",
    "audit",
    "make_kv_cache_manager",
]
