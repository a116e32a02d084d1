"""KV events: a reader that follows them knows what is cached; the log is bounded; the wire form is a map."""

from __future__ import annotations

from typing import assert_never

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_lite.cache import PagePool, RadixCache
from sglang_lite.cache.block_hash import block_hashes
from sglang_lite.cache.events import (
    MAX_HASHES_PER_EVENT,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEvent,
    KVEventLog,
)
from sglang_lite.types import Int32Array


def count_up(start: int, stop: int) -> Int32Array:
    return np.arange(start, stop, dtype=np.int32)


def put(cache: RadixCache, ids: Int32Array, namespace: str = "") -> None:
    pages = cache.pool.allocate(len(ids) // cache.pool.page_size)
    cache.pool.release(cache.insert(ids, pages, namespace).duplicates(pages))


def follow(known: set[int], events: list[KVEvent]) -> None:
    """What a router does with events."""
    for event in events:
        match event:
            case BlockStored():
                assert event.parent_block_hash is None or event.parent_block_hash in known
                known.update(event.block_hashes)
            case BlockRemoved():
                assert known.issuperset(event.block_hashes)
                known.difference_update(event.block_hashes)
            case AllBlocksCleared():
                known.clear()
            case _:
                assert_never(event)


def test_stored_events_name_each_page_and_its_parent() -> None:
    log = KVEventLog()
    cache = RadixCache(PagePool(16, 4), events=log)
    put(cache, count_up(0, 8))
    put(cache, count_up(0, 12))
    hashes = block_hashes(count_up(0, 12), 4)
    events = log.drain()
    assert [event.block_hashes for event in events if isinstance(event, BlockStored)] == [[value] for value in hashes]
    parents = [event.parent_block_hash for event in events if isinstance(event, BlockStored)]
    assert parents == [None, *hashes[:-1]]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(events[2])) == {
        "type": "BlockStored",
        "block_hashes": [hashes[2]],
        "parent_block_hash": hashes[1],
        "token_ids": [8, 9, 10, 11],
        "block_size": 4,
        "lora_id": None,
    }
    assert log.drain() == []


def test_removed_events_name_what_was_trimmed() -> None:
    log = KVEventLog()
    cache = RadixCache(PagePool(16, 4), events=log)
    put(cache, count_up(0, 16))
    hashes = block_hashes(count_up(0, 16), 4)
    log.drain()
    cache.evict(1)
    cache.match(count_up(0, 4))
    cache.evict(2)
    removed = [event.block_hashes for event in log.drain() if isinstance(event, BlockRemoved)]
    assert removed == [hashes[3:], hashes[1:3]]


def test_salted_sequences_carry_their_salt() -> None:
    log = KVEventLog()
    cache = RadixCache(PagePool(16, 4), events=log)
    put(cache, count_up(0, 8), "salt")
    events = log.drain()
    assert [event.cache_salt for event in events if isinstance(event, BlockStored)] == ["salt", "salt"]
    assert [event.block_hashes[0] for event in events if isinstance(event, BlockStored)] == block_hashes(
        count_up(0, 8), 4, "salt"
    )
    assert isinstance(events[0], BlockStored) and events[0].parent_block_hash is None


def test_flush_of_everything_is_one_event() -> None:
    log = KVEventLog()
    cache = RadixCache(PagePool(16, 4), events=log)
    put(cache, count_up(0, 8))
    put(cache, count_up(50, 58), "salt")
    log.drain()
    cache.flush("salt")
    assert [type(event) for event in log.drain()] == [BlockRemoved]
    cache.flush()
    assert log.drain() == [AllBlocksCleared()]


def test_removed_events_are_cut_to_the_limit() -> None:
    log = KVEventLog()
    log.removed([b"12345678"] * (MAX_HASHES_PER_EVENT + 1))
    assert [len(event.block_hashes) for event in log.drain() if isinstance(event, BlockRemoved)] == [
        MAX_HASHES_PER_EVENT,
        1,
    ]


def test_a_log_nobody_drains_stays_bounded() -> None:
    log = KVEventLog(capacity=4)
    cache = RadixCache(PagePool(16, 1), events=log)
    put(cache, count_up(0, 10))
    assert len(log) <= 4
    assert log.num_dropped > 0
    events = log.drain()
    assert events[0] == AllBlocksCleared()
    with pytest.raises(ValueError, match="capacity is 1"):
        KVEventLog(1)


def test_no_log_no_hashing() -> None:
    cache = RadixCache(PagePool(16, 4))
    put(cache, count_up(0, 16))
    assert all(node.digests == [] for node in cache.nodes())


SEQUENCES = st.lists(st.integers(0, 2), min_size=1, max_size=5)
STEP = st.tuples(st.sampled_from(["put", "match", "evict", "flush"]), SEQUENCES, st.sampled_from(["", "salt"]))


@settings(max_examples=60, deadline=None)
@given(st.lists(STEP, max_size=25), st.sampled_from([1, 4]))
def test_a_follower_knows_exactly_what_is_cached(steps: list[tuple[str, list[int], str]], page_size: int) -> None:
    log = KVEventLog()
    cache = RadixCache(PagePool(200, page_size), events=log)
    known: set[int] = set()
    for operation, words, namespace in steps:
        ids = np.repeat(np.array(words, dtype=np.int32), page_size)
        match operation:
            case "put":
                put(cache, ids, namespace)
            case "match":
                cache.match(ids, namespace)
            case "evict":
                cache.evict(len(words))
            case "flush":
                cache.flush(namespace if len(words) > 1 else None)
        follow(known, log.drain())
        assert len(known) == cache.num_cached_pages
        hashes = block_hashes(ids, page_size, namespace)
        assert cache.match_length(ids, namespace) // page_size == sum(value in known for value in hashes)
