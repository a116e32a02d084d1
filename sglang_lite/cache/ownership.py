"""The ownership audit: every page is in exactly one place, and the tree agrees with itself."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from sglang_lite.cache.errors import AuditError
from sglang_lite.cache.node import Node, Root
from sglang_lite.cache.radix_cache import RadixCache
from sglang_lite.types import Int32Array, Int64Array

_UNSEEN = -1
_FREE = 0
_TREE = 1
_FIRST_OWNER = 2


def audit(cache: RadixCache, held: Mapping[str, Int32Array] | Mapping[int, Int32Array]) -> None:
    """Check that each page of the pool is free, in the tree, or held by one owner, and check the tree's structure.

    Takes time proportional to the pool and the tree; meant for tests and debugging.

    Args:
        cache: the prefix cache over the pool.
        held: owner (a request, a transfer) -> int32[n], the pages that it alone owns; without pages of the tree that
            it merely uses.

    Raises:
        AuditError: names the page and its owners, or the node and what is wrong with it.
    """
    pool = cache.pool
    pool.audit()
    names = ["the free stack", "the radix tree", *(f"owner {owner!r}" for owner in held)]
    place = np.full(pool.num_pages, _UNSEEN, dtype=np.int64)
    in_tree = [node.pages for node in cache.nodes()]
    claims = [pool.free_pages(), np.concatenate(in_tree) if in_tree else np.empty(0, dtype=np.int32), *held.values()]
    for claimant, pages in enumerate(claims):
        _claim(place, np.asarray(pages, dtype=np.int64), claimant, names)
    lost = np.flatnonzero(place == _UNSEEN)
    if len(lost):
        raise AuditError(f"pages {lost[:8].tolist()} ({len(lost)} in all) are held by no known owner")
    counts = np.bincount(np.minimum(place, _FIRST_OWNER), minlength=3).tolist()
    recorded = [pool.num_free, pool.num_cached, pool.num_held]
    if counts != recorded:
        raise AuditError(f"free/cached/held pages are {counts}, the pool records {recorded}")
    _audit_tree(cache)


def _claim(place: Int64Array, pages: Int64Array, claimant: int, names: list[str]) -> None:
    outside = pages[(pages < 0) | (pages >= len(place))]
    if len(outside):
        raise AuditError(f"{names[claimant]} has pages {outside[:8].tolist()}, outside the pool of {len(place)}")
    taken = pages[place[pages] != _UNSEEN]
    if len(taken):
        page = int(taken[0])
        raise AuditError(f"page {page} is claimed by {names[claimant]} and by {names[place[page]]}")
    place[pages] = claimant
    if len(np.unique(pages)) != len(pages):
        raise AuditError(f"{names[claimant]} has a page twice: {np.sort(pages)[:64].tolist()}")


def _audit_tree(cache: RadixCache) -> None:
    cached = evictable = 0
    for node in cache.nodes():
        _audit_node(node, cache.pool.page_size * 4)
        cached += len(node.pages)
        evictable += len(node.pages) if node.lock_count == 0 else 0
    found = (cached, evictable)
    recorded = (cache.num_cached_pages, cache.num_evictable_pages)
    if found != recorded:
        raise AuditError(f"radix cache: cached/evictable pages are {found}, the cache records {recorded}")


def _audit_node(node: Node, page_bytes: int) -> None:
    if not isinstance(node, Root) and (not node.pages.size or len(node.key) != len(node.pages) * page_bytes):
        raise AuditError(f"radix cache: {node!r} has {len(node.key)} bytes of token ids")
    for first_page, child in node.children.items():
        if child.parent is not node or child.key[:page_bytes] != first_page:
            raise AuditError(f"radix cache: {child!r} is not where its parent {node!r} looks for it")
        if not isinstance(node, Root) and child.lock_count > node.lock_count:
            raise AuditError(f"radix cache: {child!r} is locked more often than its parent {node!r}")
