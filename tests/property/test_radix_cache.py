"""The radix cache against a naive model that keeps one record per page and prefix.

The model is a dictionary from (namespace, all tokens up to the end of a page) to that page's record. Longest match,
locks, ownership and the order of eviction follow from it page by page, without any tree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sglang_lite.cache import EVICTION_POLICIES, EvictionPolicy, Node, PagePool, RadixCache, audit
from sglang_lite.types import Int32Array

Prefix = tuple[str, tuple[int, ...]]

NUM_PAGES = 48
NAMESPACES = ["", "salt"]


@dataclass
class PageRecord:
    page: int
    created: int
    used: int
    priority: int
    hits: int = 0
    locks: int = 0


class NaiveCache:
    """What a prefix cache must do, said as plainly as possible."""

    def __init__(self, page_size: int, policy: EvictionPolicy) -> None:
        self.page_size = page_size
        self.policy = policy
        self.records: dict[Prefix, PageRecord] = {}
        self.clock = 0

    def tick(self) -> int:
        self.clock += 1
        return self.clock

    def prefixes(self, tokens: list[int], namespace: str) -> list[Prefix]:
        ends = range(self.page_size, len(tokens) + 1, self.page_size)
        return [(namespace, tuple(tokens[:end])) for end in ends]

    def known(self, tokens: list[int], namespace: str) -> list[Prefix]:
        found = []
        for prefix in self.prefixes(tokens, namespace):
            if prefix not in self.records:
                break
            found.append(prefix)
        return found

    def match(self, tokens: list[int], namespace: str) -> list[Prefix]:
        found, now = self.known(tokens, namespace), self.tick()
        for prefix in found:
            self.records[prefix].used = now
            self.records[prefix].hits += 1
        return found

    def insert(self, tokens: list[int], pages: list[int], namespace: str, priority: int) -> int:
        existing, now = self.known(tokens, namespace), self.tick()
        for prefix in existing:
            record = self.records[prefix]
            record.used, record.priority = now, max(record.priority, priority)
        for prefix, page in list(zip(self.prefixes(tokens, namespace), pages, strict=True))[len(existing) :]:
            self.records[prefix] = PageRecord(page, created=now, used=now, priority=priority)
        return len(existing)

    def unlock(self, path: list[Prefix]) -> None:
        now = self.tick()
        for prefix in path:
            self.records[prefix].locks -= 1
            if self.records[prefix].locks == 0:
                self.records[prefix].used = now

    def victims(self) -> list[Prefix]:
        """Unlocked pages that nothing continues."""
        continued = {(name, tokens[: -self.page_size]) for name, tokens in self.records}
        return [prefix for prefix, record in self.records.items() if record.locks == 0 and prefix not in continued]

    def evict(self, count: int) -> list[int]:
        pages: list[int] = []
        while len(pages) < count and (victims := self.victims()):
            victim = min(victims, key=lambda prefix: self.rank(self.records[prefix]))
            pages.append(self.records.pop(victim).page)
        return pages

    def rank(self, record: PageRecord) -> tuple[int, ...]:
        match self.policy:
            case "lru":
                return (record.used,)
            case "lfu":
                return (record.hits, record.used)
            case "fifo":
                return (record.created,)
            case "priority":
                return (record.priority, record.used)

    def flush(self, namespace: str | None) -> list[int]:
        gone = [
            prefix for prefix, record in self.records.items() if record.locks == 0 and namespace in (None, prefix[0])
        ]
        return [self.records.pop(prefix).page for prefix in gone]


class RadixCacheMachine(RuleBasedStateMachine):
    """Tokens come from a tiny alphabet of page contents, so that prefixes meet, split and part again all the time."""

    policy: EvictionPolicy = "lru"

    @initialize(page_size=st.sampled_from([1, 4, 16, 64]))
    def create(self, page_size: int) -> None:
        self.page_size = page_size
        self.pool = PagePool(NUM_PAGES, page_size, check_duplicates=True)
        self.cache = RadixCache(self.pool, policy=self.policy)
        self.model = NaiveCache(page_size, self.policy)
        self.locked: list[tuple[Node, list[Prefix]]] = []
        self.in_flight: Int32Array = np.empty(0, dtype=np.int32)

    def tokens_of(self, words: list[int]) -> list[int]:
        """Each word becomes one page; words differ in their last token only, to make comparisons look at all of it."""
        return [token for word in words for token in [7] * (self.page_size - 1) + [word]]

    words = st.lists(st.integers(0, 2), min_size=0, max_size=7)
    namespaces = st.sampled_from(NAMESPACES)

    def expect_match(self, pages: Int32Array, path: list[Prefix]) -> None:
        assert pages.dtype == np.int32
        assert pages.tolist() == [self.model.records[prefix].page for prefix in path]

    @rule(words=words, tail=st.integers(0, 63), namespace=namespaces, lock=st.booleans())
    def match(self, words: list[int], tail: int, namespace: str, lock: bool) -> None:
        self.check_match(self.tokens_of(words) + [9] * (tail % self.page_size), namespace, lock)

    @precondition(lambda self: self.model.records)
    @rule(data=st.data(), lock=st.booleans())
    def match_something_known(self, data: st.DataObject, lock: bool) -> None:
        namespace, tokens = data.draw(st.sampled_from(sorted(self.model.records)))
        self.check_match(list(tokens), namespace, lock)

    def check_match(self, tokens: list[int], namespace: str, lock: bool) -> None:
        array = np.array(tokens, dtype=np.int32)
        expected = len(self.model.known(tokens, namespace)) * self.page_size
        assert self.cache.match_length(array, namespace) == expected
        found = self.cache.match(array, namespace)
        path = self.model.match(tokens, namespace)
        assert found.num_tokens == expected
        self.expect_match(found.pages, path)
        if lock:
            self.cache.lock(found.node)
            for prefix in path:
                self.model.records[prefix].locks += 1
            self.locked.append((found.node, path))

    @precondition(lambda self: self.locked)
    @rule(data=st.data())
    def unlock(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.locked) - 1))
        node, path = self.locked.pop(index)
        self.cache.unlock(node)
        self.model.unlock(path)

    @rule(words=words, namespace=namespaces, priority=st.integers(-1, 2), reuse=st.booleans())
    def insert(self, words: list[int], namespace: str, priority: int, reuse: bool) -> None:
        """Insert as a request does: with the tree's own pages for what it matched, or with duplicates of them."""
        tokens = self.tokens_of(words)
        known = [self.model.records[prefix].page for prefix in self.model.known(tokens, namespace)] if reuse else []
        count = len(words) - len(known)
        if count > self.pool.num_free:
            self.evict(count - self.pool.num_free)
            known = known if len(self.model.known(tokens, namespace)) == len(known) else []
            count = len(words) - len(known)
        if count > self.pool.num_free:
            return
        own = self.pool.allocate(count)
        pages = np.concatenate((np.array(known, dtype=np.int32), own)).astype(np.int32)
        result = self.cache.insert(np.array(tokens, dtype=np.int32), pages, namespace, priority)
        assert result.existing_pages == self.model.insert(tokens, pages.tolist(), namespace, priority)
        self.expect_match(result.pages, self.model.known(tokens, namespace))
        duplicates = result.duplicates(pages)
        assert set(duplicates.tolist()) == set(own.tolist()) - set(result.pages.tolist())
        self.pool.release(duplicates)
        pages.fill(-1)

    @rule()
    def evict_one(self) -> None:
        self.evict(1)

    @rule(count=st.integers(0, 12))
    def evict(self, count: int) -> None:
        expected = self.model.evict(count)
        free_before = set(self.pool.free_pages().tolist())
        assert self.cache.evict(count) == len(expected)
        assert set(self.pool.free_pages().tolist()) - free_before == set(expected)

    @rule(namespace=st.sampled_from([None, *NAMESPACES]))
    def flush(self, namespace: str | None) -> None:
        assert self.cache.flush(namespace) == len(self.model.flush(namespace))

    @rule(count=st.integers(1, 4))
    def hold_pages(self, count: int) -> None:
        """A running request takes pages away and gives them back with the next call."""
        self.pool.release(self.in_flight)
        self.in_flight = self.pool.allocate(min(count, self.pool.num_free))

    @invariant()
    def accounting_is_exact(self) -> None:
        audit(self.cache, {"in flight": self.in_flight})
        records = self.model.records.values()
        assert self.cache.num_cached_pages == self.pool.num_cached == len(records)
        assert self.cache.num_evictable_pages == sum(record.locks == 0 for record in records)
        assert self.pool.num_held == len(self.in_flight)


SETTINGS = settings(
    max_examples=50, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


def machine_test(policy: EvictionPolicy) -> Any:
    machine = type(f"RadixCacheMachine_{policy}", (RadixCacheMachine,), {"policy": policy})
    test: Any = machine.TestCase  # type: ignore[attr-defined]
    test.settings = SETTINGS
    return test


TestLeastRecentlyUsed = machine_test("lru")
TestLeastFrequentlyUsed = machine_test("lfu")
TestFirstInFirstOut = machine_test("fifo")
TestPriority = machine_test("priority")


def test_the_model_itself_tells_policies_apart() -> None:
    """Guard against a model whose ranks agree by accident: each policy picks another victim here."""
    victims = {}
    for policy in EVICTION_POLICIES:
        model = NaiveCache(1, policy)
        model.insert([1], [1], "", 2)
        model.insert([2], [2], "", 1)
        model.insert([3], [3], "", 0)
        model.insert([4], [4], "", 3)
        for token in (3, 3, 4, 1, 1):
            model.match([token], "")
        model.match([2], "")
        model.match([2], "")
        victims[policy] = model.evict(1)[0]
    assert victims == {"lru": 3, "lfu": 4, "fifo": 1, "priority": 3}
    with pytest.raises(KeyError):
        NaiveCache(1, "lru").unlock([("", (1,))])
