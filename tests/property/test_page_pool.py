"""The page pool against a naive model: who owns which page, and in which order pages are handed out."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sglang_lite.cache import PageAccountingError, PagePool, PoolExhausted
from sglang_lite.types import Int32Array


def int32(pages: list[int]) -> Int32Array:
    return np.array(pages, dtype=np.int32)


class PagePoolMachine(RuleBasedStateMachine):
    """The model keeps the free pages as a list whose front is handed out next."""

    @initialize(num_pages=st.integers(1, 40), page_size=st.sampled_from([1, 4, 16, 64]))
    def create(self, num_pages: int, page_size: int) -> None:
        self.pool = PagePool(num_pages, page_size, check_duplicates=True)
        self.free = list(range(num_pages))
        self.held: list[int] = []
        self.cached: list[int] = []

    def some_of(self, data: st.DataObject, pages: list[int]) -> list[int]:
        return data.draw(st.lists(st.sampled_from(pages), min_size=1, unique=True))

    @rule(count=st.integers(0, 45))
    def allocate(self, count: int) -> None:
        if count > len(self.free):
            with pytest.raises(PoolExhausted) as error:
                self.pool.allocate(count)
            assert (error.value.requested, error.value.available) == (count, len(self.free))
            return
        pages = self.pool.allocate(count)
        assert pages.dtype == np.int32
        assert pages.tolist() == self.free[:count]
        self.held += self.free[:count]
        del self.free[:count]

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        pages = self.some_of(data, self.held)
        self.pool.release(int32(pages))
        self.held = [page for page in self.held if page not in pages]
        self.free = pages + self.free

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def adopt(self, data: st.DataObject) -> None:
        pages = self.some_of(data, self.held)
        self.pool.adopt(int32(pages))
        self.held = [page for page in self.held if page not in pages]
        self.cached += pages

    @precondition(lambda self: self.cached)
    @rule(data=st.data())
    def reclaim(self, data: st.DataObject) -> None:
        pages = self.some_of(data, self.cached)
        self.pool.reclaim(int32(pages))
        self.cached = [page for page in self.cached if page not in pages]
        self.free = pages + self.free

    @rule(data=st.data(), operation=st.sampled_from(["release", "adopt", "reclaim"]))
    def refuse_what_is_not_owned(self, data: st.DataObject, operation: str) -> None:
        owned = self.cached if operation == "reclaim" else self.held
        others = sorted({-1, self.pool.num_pages, *range(self.pool.num_pages)} - set(owned))
        wrong = data.draw(st.lists(st.sampled_from(others), min_size=1))
        right = data.draw(st.lists(st.sampled_from(owned), unique=True)) if owned else []
        with pytest.raises(PageAccountingError, match=operation):
            getattr(self.pool, operation)(int32(data.draw(st.permutations(right + wrong))))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def refuse_a_page_twice_in_one_call(self, data: st.DataObject) -> None:
        pages = self.some_of(data, self.held)
        with pytest.raises(PageAccountingError, match="twice"):
            self.pool.release(int32(pages + pages[:1]))

    @rule()
    def reset(self) -> None:
        self.pool.reset()
        self.free = list(range(self.pool.num_pages))
        self.held, self.cached = [], []

    @invariant()
    def counts_add_up(self) -> None:
        pool = self.pool
        assert (pool.num_free, pool.num_held, pool.num_cached) == (len(self.free), len(self.held), len(self.cached))
        assert pool.num_free + pool.num_held + pool.num_cached == pool.num_pages
        assert pool.free_pages().tolist() == self.free
        pool.audit()


PagePoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPagePool = PagePoolMachine.TestCase
