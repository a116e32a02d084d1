"""The radix cache: matches, splits, ownership of inserted pages, locks, bounded eviction, flush, namespaces."""

from __future__ import annotations

import gc
import sys

import numpy as np
import pytest

from sglang_lite.cache import (
    EVICTION_POLICIES,
    EvictionPolicy,
    InsertResult,
    PageAccountingError,
    PagePool,
    RadixCache,
    audit,
)
from sglang_lite.types import Int32Array


def tokens(*ids: int) -> Int32Array:
    return np.array(ids, dtype=np.int32)


def count_up(start: int, stop: int) -> Int32Array:
    return np.arange(start, stop, dtype=np.int32)


def make_cache(num_pages: int = 64, page_size: int = 4, policy: EvictionPolicy = "lru") -> RadixCache:
    return RadixCache(PagePool(num_pages, page_size, check_duplicates=True), policy=policy)


def put(cache: RadixCache, ids: Int32Array, namespace: str = "", priority: int = 0) -> InsertResult:
    """Insert a sequence with pages of its own and release the duplicates."""
    pages = cache.pool.allocate(len(ids) // cache.pool.page_size)
    result = cache.insert(ids, pages, namespace, priority)
    cache.pool.release(result.duplicates(pages))
    return result


def test_empty_cache_matches_nothing() -> None:
    cache = make_cache()
    match = cache.match(count_up(0, 40))
    assert (match.num_tokens, match.pages.tolist()) == (0, [])
    cache.lock(match.node)
    cache.unlock(match.node)
    assert cache.match(tokens()).num_tokens == 0


def test_match_is_truncated_to_whole_pages() -> None:
    cache = make_cache(page_size=16)
    put(cache, count_up(0, 32))
    assert cache.match(count_up(0, 40)).num_tokens == 32
    assert cache.match(count_up(0, 31)).num_tokens == 16
    assert cache.match(count_up(0, 15)).num_tokens == 0


def test_page_1_matches_every_token() -> None:
    cache = make_cache(page_size=1)
    put(cache, count_up(0, 40))
    assert cache.match(count_up(0, 40)).num_tokens == 40
    assert cache.match(count_up(0, 7)).num_tokens == 7


def test_branch_inside_a_page_is_no_match_of_that_page() -> None:
    cache = make_cache()
    put(cache, tokens(1, 2, 3, 4, 5, 6, 7, 8))
    assert cache.match(tokens(1, 2, 3, 4, 9, 9, 9, 9)).num_tokens == 4
    assert cache.match(tokens(1, 2, 3, 4, 5, 6, 7, 9)).num_tokens == 4
    assert cache.match(tokens(1, 2, 3, 9)).num_tokens == 0


def test_no_match_across_a_branch_never_inserted() -> None:
    cache = make_cache(page_size=1)
    put(cache, tokens(1, 2, 3))
    put(cache, tokens(1, 5, 6))
    assert cache.match(tokens(1, 2, 6)).num_tokens == 2
    assert cache.match(tokens(1, 5, 3)).num_tokens == 2
    assert cache.match(tokens(2, 3)).num_tokens == 0


def test_bytes_that_agree_at_another_alignment_do_not_match() -> None:
    cache = make_cache(page_size=1)
    put(cache, tokens(0x00000100, 0x00000200))
    assert cache.match(tokens(0x00010000, 0x00020000)).num_tokens == 0
    assert cache.match(tokens(0x00000100, 0x00000201)).num_tokens == 1


def test_match_splits_so_that_a_lock_covers_the_prefix_only() -> None:
    cache = make_cache()
    put(cache, count_up(0, 40))
    match = cache.match(count_up(0, 18))
    assert match.pages.tolist() == [0, 1, 2, 3]
    cache.lock(match.node)
    assert cache.num_evictable_pages == 6
    assert cache.evict(100) == 6
    assert cache.match(count_up(0, 40)).pages.tolist() == [0, 1, 2, 3]
    assert cache.evict(100) == 0
    cache.unlock(match.node)
    assert cache.evict(100) == 4
    audit(cache, {})


def test_lock_taken_before_a_split_still_covers_all_of_it() -> None:
    cache = make_cache()
    put(cache, count_up(0, 40))
    long = cache.match(count_up(0, 40))
    cache.lock(long.node)
    short = cache.match(count_up(0, 12))
    cache.lock(short.node)
    cache.unlock(short.node)
    assert cache.num_evictable_pages == 0
    cache.unlock(long.node)
    assert cache.num_evictable_pages == 10


def test_insert_says_which_pages_were_there() -> None:
    cache = make_cache()
    first = put(cache, count_up(0, 16))
    assert (first.existing_pages, first.pages.tolist()) == (0, [0, 1, 2, 3])
    own = cache.pool.allocate(6)
    longer = cache.insert(count_up(0, 24), own)
    assert longer.existing_pages == 4
    assert longer.pages.tolist() == [0, 1, 2, 3, 8, 9]
    assert longer.duplicates(own).tolist() == [4, 5, 6, 7]
    audit(cache, {"request": longer.duplicates(own)})


def test_insert_with_the_tree_s_own_pages_leaves_no_duplicates() -> None:
    cache = make_cache()
    put(cache, count_up(0, 16))
    match = cache.match(count_up(0, 16))
    table = np.concatenate((match.pages, cache.pool.allocate(2)))
    result = cache.insert(count_up(0, 24), table)
    assert result.duplicates(table).tolist() == []
    assert cache.pool.num_held == 0


def test_insert_of_a_known_prefix_adds_nothing() -> None:
    cache = make_cache()
    put(cache, count_up(0, 40))
    result = put(cache, count_up(0, 20))
    assert result.existing_pages == 5
    assert result.pages.tolist() == [0, 1, 2, 3, 4]
    assert cache.num_cached_pages == 10
    cache.lock(result.node)
    assert cache.num_evictable_pages == 5


def test_insert_copies_the_caller_s_array() -> None:
    cache = make_cache()
    table = np.zeros(100, dtype=np.int32)
    table[:4] = cache.pool.allocate(4)
    cache.insert(count_up(0, 16), table[:4])
    table.fill(99)
    assert cache.match(count_up(0, 16)).pages.tolist() == [0, 1, 2, 3]


def test_results_cannot_be_used_to_change_the_tree() -> None:
    cache = make_cache()
    put(cache, count_up(0, 16))
    with pytest.raises(ValueError, match="read-only"):
        cache.match(count_up(0, 16)).pages[0] = 5
    cache.match(count_up(0, 8))
    for length in (8, 16):
        pages = cache.match(count_up(0, length)).pages
        assert pages.tolist() == list(range(length // 4))


def test_insert_refuses_pages_that_are_not_held_and_stays_as_it_was() -> None:
    cache = make_cache()
    put(cache, count_up(0, 16))
    with pytest.raises(PageAccountingError, match="page 60 is free"):
        cache.insert(np.concatenate((count_up(0, 8), count_up(50, 58))), np.array([0, 1, 60, 61], dtype=np.int32))
    audit(cache, {})
    assert cache.match(np.concatenate((count_up(0, 8), count_up(50, 58)))).num_tokens == 8
    with pytest.raises(PageAccountingError):
        cache.insert(count_up(0, 16), np.array([60, 61, 62, 63], dtype=np.int32), "other")
    assert cache.match(count_up(0, 16), "other").num_tokens == 0
    assert cache.num_cached_pages == 4


def test_insert_refuses_incomplete_pages() -> None:
    cache = make_cache()
    with pytest.raises(ValueError, match="7 tokens do not fill 2 pages of 4"):
        cache.insert(count_up(0, 7), cache.pool.allocate(2))


def test_token_ids_of_another_width_are_refused() -> None:
    cache = make_cache()
    put(cache, count_up(0, 16))
    with pytest.raises(TypeError, match="int64"):
        cache.match(np.arange(16))  # type: ignore[arg-type]


def test_namespaces_are_separate() -> None:
    cache = make_cache()
    shared = put(cache, count_up(0, 16))
    salted = put(cache, count_up(0, 16), "salt")
    assert salted.existing_pages == 0
    assert set(shared.pages.tolist()).isdisjoint(salted.pages.tolist())
    assert cache.match(count_up(0, 16), "salt").pages.tolist() == salted.pages.tolist()
    assert cache.match(count_up(0, 16), "pepper").num_tokens == 0
    assert cache.flush("salt") == 4
    assert cache.match(count_up(0, 16), "salt").num_tokens == 0
    assert cache.match(count_up(0, 16)).num_tokens == 16


def test_namespaces_leave_nothing_behind() -> None:
    cache = make_cache()
    for index in range(50):
        cache.match(count_up(0, 16), f"unknown {index}")
        put(cache, count_up(0, 16), f"salt {index}")
        cache.evict(4)
    assert list(cache.nodes()) == []


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_eviction_is_bounded_and_trims_the_tail(policy: EvictionPolicy) -> None:
    cache = make_cache(policy=policy)
    put(cache, count_up(0, 40))
    assert cache.evict(3) == 3
    assert cache.pool.num_free == 57
    assert cache.match(count_up(0, 40)).num_tokens == 28
    assert cache.evict(0) == 0
    assert cache.evict(100) == 7
    assert cache.evict(1) == 0
    audit(cache, {})


def victims(policy: EvictionPolicy) -> list[int]:
    """Evict four one-page sequences, used as the calls say, one by one; returns their order."""
    cache = make_cache(page_size=1, policy=policy)
    for token, priority in ((1, 2), (2, 1), (3, 0), (4, 3)):
        put(cache, tokens(token), priority=priority)
    for token in (3, 3, 3, 4, 1, 1, 2, 2):
        cache.match(tokens(token))
    order = []
    remaining = {1, 2, 3, 4}
    while remaining:
        cache.evict(1)
        gone = {token for token in remaining if not cache.match_length(tokens(token))}
        order += list(gone)
        remaining -= gone
    return order


def test_each_policy_has_its_order() -> None:
    assert {policy: victims(policy) for policy in EVICTION_POLICIES} == {
        "lru": [3, 4, 1, 2],
        "lfu": [4, 1, 2, 3],
        "fifo": [1, 2, 3, 4],
        "priority": [3, 2, 1, 4],
    }


SPLIT_ORDER: dict[EvictionPolicy, list[str]] = {
    "lru": ["long", "long", "other", "long"],
    "lfu": ["other", "long", "long", "long"],
    "fifo": ["long", "long", "long", "other"],
    "priority": ["other", "long", "long", "long"],
}


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_split_hands_its_standing_to_both_parts(policy: EvictionPolicy) -> None:
    cache = make_cache(page_size=1, policy=policy)
    sequences = {"long": tokens(1, 2, 3), "other": tokens(9)}
    put(cache, sequences["long"], priority=5)
    for _ in range(5):
        cache.match(sequences["long"])
    put(cache, sequences["other"], priority=1)
    cache.match(sequences["other"])
    cache.match(tokens(1))
    order = []
    while cache.num_cached_pages:
        before = {name: cache.match_length(ids) for name, ids in sequences.items()}
        assert cache.evict(1) == 1
        order += [name for name, ids in sequences.items() if cache.match_length(ids) < before[name]]
    assert order == SPLIT_ORDER[policy]


def test_match_length_changes_nothing() -> None:
    cache = make_cache()
    put(cache, count_up(0, 16))
    put(cache, count_up(100, 116))
    assert cache.match_length(count_up(0, 11)) == 8
    assert len(list(cache.nodes())) == 3
    cache.evict(4)
    assert cache.match_length(count_up(0, 16)) == 0


def test_unlock_counts_as_a_use() -> None:
    cache = make_cache()
    old = put(cache, count_up(0, 16))
    cache.lock(old.node)
    put(cache, count_up(100, 116))
    cache.unlock(old.node)
    cache.evict(4)
    assert cache.match_length(count_up(0, 16)) == 16


def test_locks_that_cannot_be() -> None:
    cache = make_cache()
    node = put(cache, count_up(0, 16)).node
    with pytest.raises(PageAccountingError, match="not locked"):
        cache.unlock(node)
    cache.evict(100)
    with pytest.raises(PageAccountingError, match="evicted"):
        cache.lock(node)
    with pytest.raises(PageAccountingError, match="not locked"):
        cache.unlock(node)


def test_flush_keeps_what_is_locked() -> None:
    cache = make_cache()
    put(cache, count_up(0, 40))
    match = cache.match(count_up(0, 16))
    cache.lock(match.node)
    assert cache.flush() == 6
    assert cache.num_cached_pages == 4
    cache.unlock(match.node)
    assert cache.flush() == 4
    assert cache.flush() == 0
    assert cache.pool.num_free == 64
    audit(cache, {})


def test_disabled_cache_takes_nothing() -> None:
    pool = PagePool(8, 4)
    cache = RadixCache(pool, enabled=False)
    pages = pool.allocate(4)
    result = cache.insert(count_up(0, 16), pages)
    assert (result.existing_pages, result.pages.tolist()) == (0, [])
    cache.lock(result.node)
    cache.unlock(result.node)
    pool.release(result.duplicates(pages))
    assert cache.match(count_up(0, 16)).num_tokens == 0
    assert pool.num_free == 8


def test_unknown_policy_names_the_allowed_ones() -> None:
    with pytest.raises(ValueError, match=r"'mru'.*lru, lfu, fifo, priority"):
        RadixCache(PagePool(1, 1), policy="mru")  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_memory_does_not_grow_with_use(policy: EvictionPolicy) -> None:
    """Thousands of matches, locks, inserts and evictions leave no more objects behind than a few."""
    cache = make_cache(num_pages=64, page_size=1, policy=policy)

    def round_of_use(start: int) -> None:
        for step in range(start, start + 1000):
            if cache.pool.num_free < 4:
                cache.evict(4)
            node = put(cache, tokens(step % 3, step, step + 1, step + 2)).node
            cache.lock(node)
            cache.unlock(node)
            cache.match(tokens(0))
        cache.flush()

    round_of_use(0)
    gc.collect()
    before = sys.getallocatedblocks()
    round_of_use(10_000)
    gc.collect()
    assert sys.getallocatedblocks() - before < 500


def test_a_deep_path_needs_no_recursion() -> None:
    depth = sys.getrecursionlimit() + 200
    cache = make_cache(num_pages=depth, page_size=1)
    ids = count_up(0, depth)
    put(cache, ids)
    for length in range(depth - 1, 0, -1):
        cache.match(ids[:length])
    assert len(list(cache.nodes())) == depth + 1
    match = cache.match(ids)
    assert match.pages.tolist() == list(range(depth))
    cache.lock(match.node)
    cache.unlock(match.node)
    assert cache.flush() == depth
