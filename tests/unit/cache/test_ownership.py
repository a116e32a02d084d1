"""The ownership audit finds every kind of wrong accounting and names it."""

from __future__ import annotations

import numpy as np
import pytest

from sglang_lite.cache import AuditError, PagePool, RadixCache, audit
from sglang_lite.types import Int32Array


def int32(*pages: int) -> Int32Array:
    return np.array(pages, dtype=np.int32)


@pytest.fixture
def cache() -> RadixCache:
    """Pages 0 to 3 are in the tree, 4 and 5 held, 6 and 7 free."""
    cache = RadixCache(PagePool(8, 4))
    cache.insert(np.arange(16, dtype=np.int32), cache.pool.allocate(4))
    cache.pool.allocate(2)
    return cache


def test_right_accounting_passes(cache: RadixCache) -> None:
    audit(cache, {"request 1": int32(4), "transfer 7": int32(5)})


@pytest.mark.parametrize(
    ("held", "named"),
    [
        ({"request 1": int32(4)}, r"pages \[5\] \(1 in all\) are held by no known owner"),
        (
            {"request 1": int32(4, 5), "transfer 7": int32(5)},
            "page 5 is claimed by owner 'transfer 7' and by owner 'r",
        ),
        ({"request 1": int32(4, 5, 3)}, "page 3 is claimed by owner 'request 1' and by the radix tree"),
        ({"request 1": int32(4, 5, 7)}, "page 7 is claimed by owner 'request 1' and by the free stack"),
        ({"request 1": int32(4, 5, 5)}, "owner 'request 1' has a page twice"),
        ({"request 1": int32(4, 5, 8)}, r"owner 'request 1' has pages \[8\], outside the pool of 8"),
    ],
)
def test_wrong_owners(cache: RadixCache, held: dict[str, Int32Array], named: str) -> None:
    with pytest.raises(AuditError, match=named):
        audit(cache, held)


HELD = {"request 1": int32(4, 5)}


def test_tree_that_lost_a_page(cache: RadixCache) -> None:
    node = cache.match(np.arange(16, dtype=np.int32)).node
    node.pages = node.pages[:3]
    node.key = node.key[: 3 * 16]
    with pytest.raises(AuditError, match=r"pages \[3\]"):
        audit(cache, HELD)


def test_node_with_a_key_of_another_length(cache: RadixCache) -> None:
    node = cache.match(np.arange(16, dtype=np.int32)).node
    node.key = node.key[:16]
    with pytest.raises(AuditError, match="16 bytes of token ids"):
        audit(cache, HELD)


def test_child_locked_more_often_than_its_parent(cache: RadixCache) -> None:
    cache.match(np.arange(8, dtype=np.int32))
    leaf = cache.match(np.arange(16, dtype=np.int32)).node
    leaf.lock_count += 1
    with pytest.raises(AuditError, match="locked more often"):
        audit(cache, HELD)


def test_child_under_the_wrong_first_page(cache: RadixCache) -> None:
    root = next(cache.nodes())
    root.children[b"x" * 16] = root.children.pop(next(iter(root.children)))
    with pytest.raises(AuditError, match="is not where its parent"):
        audit(cache, HELD)


def test_lock_that_bypassed_the_cache(cache: RadixCache) -> None:
    cache.match(np.arange(16, dtype=np.int32)).node.lock_count += 1
    with pytest.raises(AuditError, match="cached/evictable pages"):
        audit(cache, HELD)
