"""The page pool: order of allocation, refusals that leave everything as it was, and its own audit."""

from __future__ import annotations

import numpy as np
import pytest

from sglang_lite.cache import AuditError, PageAccountingError, PagePool, PoolExhausted
from sglang_lite.types import Int32Array


def int32(*pages: int) -> Int32Array:
    return np.array(pages, dtype=np.int32)


def test_pages_are_handed_out_from_the_lowest_and_released_ones_first() -> None:
    pool = PagePool(10, 16)
    assert pool.allocate(4).tolist() == [0, 1, 2, 3]
    pool.release(int32(2, 0))
    assert pool.allocate(3).tolist() == [2, 0, 4]


def test_allocation_is_all_or_nothing() -> None:
    pool = PagePool(3, 1)
    pool.allocate(1)
    with pytest.raises(PoolExhausted, match="3 pages requested, 2 free") as error:
        pool.allocate(3)
    assert (error.value.requested, error.value.available) == (3, 2)
    assert pool.num_free == 2
    assert pool.allocate(2).tolist() == [1, 2]


def test_allocated_pages_do_not_alias_the_pool() -> None:
    pool = PagePool(4, 1)
    pages = pool.allocate(2)
    pages.fill(3)
    pool.release(int32(0, 1))
    assert sorted(pool.allocate(4).tolist()) == [0, 1, 2, 3]


def test_counts_follow_every_transition() -> None:
    pool = PagePool(8, 1)
    pages = pool.allocate(5)
    assert (pool.num_free, pool.num_held, pool.num_cached) == (3, 5, 0)
    pool.adopt(pages[:2])
    assert (pool.num_free, pool.num_held, pool.num_cached) == (3, 3, 2)
    pool.reclaim(pages[:1])
    assert (pool.num_free, pool.num_held, pool.num_cached) == (4, 3, 1)
    pool.release(pages[2:])
    assert (pool.num_free, pool.num_held, pool.num_cached) == (7, 0, 1)
    assert pool.owners(pages).tolist() == [0, 2, 0, 0, 0]
    pool.reset()
    assert (pool.num_free, pool.num_held, pool.num_cached) == (8, 0, 0)
    pool.audit()


def test_a_second_release_is_refused_and_changes_nothing() -> None:
    pool = PagePool(4, 1)
    pages = pool.allocate(2)
    pool.release(pages[:1])
    with pytest.raises(PageAccountingError, match="page 0 is free, expected held"):
        pool.release(pages)
    assert (pool.num_free, pool.num_held) == (3, 1)
    pool.audit()


def test_a_cached_page_cannot_be_released() -> None:
    pool = PagePool(4, 1)
    pages = pool.allocate(1)
    pool.adopt(pages)
    with pytest.raises(PageAccountingError, match="page 0 is cached"):
        pool.release(pages)
    with pytest.raises(PageAccountingError, match="cannot adopt"):
        pool.adopt(pages)


@pytest.mark.parametrize("page", [-1, 4, -(2**31), 2**31 - 1])
def test_pages_outside_the_pool_are_refused(page: int) -> None:
    pool = PagePool(4, 1)
    pool.allocate(4)
    with pytest.raises(PageAccountingError, match="pages are 0 to 3"):
        pool.release(int32(0, page))
    assert pool.num_held == 4


def test_a_page_twice_in_one_call() -> None:
    strict = PagePool(4, 1, check_duplicates=True)
    strict.allocate(2)
    with pytest.raises(PageAccountingError, match="twice"):
        strict.release(int32(0, 0))
    assert strict.num_held == 2
    lenient = PagePool(4, 1)
    lenient.allocate(2)
    lenient.release(int32(0, 0))
    with pytest.raises(AuditError):
        lenient.audit()


def test_empty_calls() -> None:
    pool = PagePool(2, 1)
    assert pool.allocate(0).shape == (0,)
    pool.release(int32())
    assert pool.num_free == 2


def test_strided_page_ids_are_accepted() -> None:
    pool = PagePool(8, 1)
    table = np.zeros((4, 2), dtype=np.int32)
    table[:, 0] = pool.allocate(4)
    pool.release(table[:, 0])
    assert pool.num_free == 8


@pytest.mark.parametrize(("num_pages", "page_size"), [(0, 1), (-1, 1), (2**31, 1), (1, 0)])
def test_impossible_sizes(num_pages: int, page_size: int) -> None:
    with pytest.raises(ValueError, match=r"num_pages|page_size"):
        PagePool(num_pages, page_size)
    with pytest.raises(ValueError, match="-1"):
        PagePool(2, 1).allocate(-1)
