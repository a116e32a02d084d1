"""Prefix cache and page pool: NumPy and plain Python, no torch, no clock."""

from sglang_lite.cache.errors import AuditError, PageAccountingError, PoolExhausted
from sglang_lite.cache.eviction import EVICTION_POLICIES, EvictionPolicy
from sglang_lite.cache.node import Node
from sglang_lite.cache.ownership import audit
from sglang_lite.cache.page_pool import PagePool
from sglang_lite.cache.radix_cache import InsertResult, PrefixMatch, RadixCache

__all__ = [
    "EVICTION_POLICIES",
    "AuditError",
    "EvictionPolicy",
    "InsertResult",
    "Node",
    "PageAccountingError",
    "PagePool",
    "PoolExhausted",
    "PrefixMatch",
    "RadixCache",
    "audit",
]
