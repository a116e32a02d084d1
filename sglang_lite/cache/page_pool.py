"""The pool of KV pages: which pages are free, and who owns the others.

Every page is free (on the free stack), cached (owned by the radix tree) or held (owned by a request or a transfer).
One byte per page records which, so that a wrong transition is refused when it happens and the three counts always
add up to the pool.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from sglang_lite.cache.errors import AuditError, PageAccountingError, PoolExhausted
from sglang_lite.types import Int32Array, UInt8Array

FREE: Final = 0
HELD: Final = 1
CACHED: Final = 2

_OWNER_NAMES: Final = ("free", "held", "cached")
_MAX_PAGES: Final = 2**31 - 1


class PagePool:
    """A free stack of page ids with one owner byte per page.

    The lowest page ids are handed out first, and released pages before never-used ones, in the order in which they
    were released: a busy server then touches as few distinct pages as it needs.

    Args:
        num_pages: pages in the pool, at least 1.
        page_size: tokens per page, at least 1.
        check_duplicates: also refuse a page named twice within one call, which costs a second pass over the call's
            pages (tests and debugging; ``audit`` finds such a fault afterwards in any case).
    """

    def __init__(self, num_pages: int, page_size: int, *, check_duplicates: bool = False) -> None:
        if not 1 <= num_pages <= _MAX_PAGES:
            raise ValueError(f"num_pages is {num_pages}; allowed are 1 to {_MAX_PAGES}")
        if page_size < 1:
            raise ValueError(f"page_size is {page_size}; it must be at least 1 token")
        self.num_pages: Final = num_pages
        self.page_size: Final = page_size
        self._check_duplicates = check_duplicates
        self._stack: Int32Array = np.empty(num_pages, dtype=np.int32)
        self._owner: UInt8Array = np.empty(num_pages, dtype=np.uint8)
        self.reset()

    def reset(self) -> None:
        """Make every page free, whoever owns it."""
        self._stack[:] = np.arange(self.num_pages - 1, -1, -1, dtype=np.int32)
        self._owner.fill(FREE)
        self._num_free = self.num_pages
        self._num_cached = 0

    @property
    def num_free(self) -> int:
        """Pages that ``allocate`` can hand out."""
        return self._num_free

    @property
    def num_cached(self) -> int:
        """Pages owned by the radix tree."""
        return self._num_cached

    @property
    def num_held(self) -> int:
        """Pages owned by requests and transfers."""
        return self.num_pages - self._num_free - self._num_cached

    def allocate(self, count: int) -> Int32Array:
        """Take ``count`` pages: free -> held. All or nothing.

        Returns:
            int32[count], a fresh array.

        Raises:
            PoolExhausted: fewer than ``count`` pages are free.
        """
        top = self._num_free
        if count > top:
            raise PoolExhausted(count, top)
        if count < 0:
            raise ValueError(f"cannot allocate {count} pages")
        bottom = top - count
        pages: Int32Array = self._stack[bottom:top][::-1].copy()
        self._owner[pages.astype(np.intp)] = HELD
        self._num_free = bottom
        return pages

    def release(self, pages: Int32Array) -> None:
        """Give back pages of a request or a transfer: held -> free.

        Args:
            pages: int32[n]; handed out again in this order.

        Raises:
            PageAccountingError: a page is free already, owned by the tree, or not a page of this pool.
        """
        self._move(pages, HELD, FREE, "release")
        self._push(pages)

    def adopt(self, pages: Int32Array) -> None:
        """The radix tree takes over pages of a request: held -> cached. Errors as ``release``."""
        self._move(pages, HELD, CACHED, "adopt")
        self._num_cached += len(pages)

    def reclaim(self, pages: Int32Array) -> None:
        """The radix tree gives up pages: cached -> free. Errors as ``release``."""
        self._move(pages, CACHED, FREE, "reclaim")
        self._num_cached -= len(pages)
        self._push(pages)

    def owners(self, pages: Int32Array) -> UInt8Array:
        """Owner byte of each page: uint8[n] of ``FREE``, ``HELD`` or ``CACHED``."""
        owners: UInt8Array = self._owner[pages]
        return owners

    def free_pages(self) -> Int32Array:
        """The free pages in the order in which they will be handed out: int32[num_free], a copy."""
        pages: Int32Array = self._stack[: self._num_free][::-1].copy()
        return pages

    def audit(self) -> None:
        """Check that the free stack, the owner bytes and the counts agree; raise ``AuditError`` where they do not."""
        counts = np.bincount(self._owner, minlength=3).tolist()
        expected = [self._num_free, self.num_held, self._num_cached]
        if counts != expected:
            raise AuditError(f"page pool: owner bytes count {counts} pages free/held/cached, the counters {expected}")
        free = self._stack[: self._num_free]
        wrong = free[self._owner[free] != FREE]
        if len(wrong):
            raise AuditError(f"page pool: pages {wrong[:8].tolist()} are on the free stack and owned by someone")
        if len(np.unique(free)) != len(free):
            raise AuditError("page pool: a page is on the free stack twice")

    def _push(self, pages: Int32Array) -> None:
        top = self._num_free
        self._num_free = top + len(pages)
        self._stack[top : self._num_free] = pages[::-1]

    def _move(self, pages: Int32Array, source: int, target: int, operation: str) -> None:
        # Seen as unsigned, a negative id is out of range too instead of counting from the end. Converting once to
        # the index type is what makes the read and the write below cheap.
        index = pages.view(np.uint32).astype(np.intp)
        try:
            owners = self._owner.take(index)
        except IndexError:
            outside = pages[(pages < 0) | (pages >= self.num_pages)]
            raise PageAccountingError(
                f"page pool: cannot {operation} pages {outside[:8].tolist()}; pages are 0 to {self.num_pages - 1}"
            ) from None
        if np.count_nonzero(owners == source) != len(pages):
            wrong = pages[owners != source][:8].tolist()
            found = ", ".join(f"page {page} is {_OWNER_NAMES[self._owner[page]]}" for page in wrong)
            raise PageAccountingError(f"page pool: cannot {operation}: {found}, expected {_OWNER_NAMES[source]}")
        if self._check_duplicates and len(np.unique(pages)) != len(pages):
            raise PageAccountingError(f"page pool: cannot {operation}: a page is named twice in {pages[:64].tolist()}")
        self._owner[index] = target
