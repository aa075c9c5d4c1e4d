"""The KV cache's bookkeeping: which block belongs to whom. Pure Python, no torch; the tensors are in ``cache.kv_cache``."""

from refimpl.cache.auditor import Snapshot, Violation, audit
from refimpl.cache.block_pool import BlockPool
from refimpl.cache.block_table import BlockTable
from refimpl.cache.kv_cache_manager import Allocation, KVCacheManager
from refimpl.cache.prefix_cache import PrefixCache, PrefixCacheStats

__all__ = [
    "Allocation",
    "BlockPool",
    "BlockTable",
    "KVCacheManager",
    "PrefixCache",
    "PrefixCacheStats",
    "Snapshot",
    "Violation",
    "audit",
]
