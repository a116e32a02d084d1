"""Pages of the running requests: taken from the prefix cache or the pool, published, and given back.

Plans run strictly in the order of submission. A page released here may therefore be handed to a later plan at once,
even while a plan in flight still reads or writes it for its old owner.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sglang_lite.cache import AuditError, Node, PagePool, RadixCache
from sglang_lite.cache.events import KVEventLog
from sglang_lite.cache.page_pool import HELD
from sglang_lite.scheduler.config import SchedulerConfig
from sglang_lite.scheduler.request import Request
from sglang_lite.scheduler.table import RequestTable
from sglang_lite.scheduler.transfers import Holds
from sglang_lite.types import Int32Array

_NO_PAGES: Int32Array = np.empty(0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class PrefixUse:
    """What a request takes from the prefix cache when it starts.

    Attributes:
        pages: int32[k], pages of the tree that the request reads; its node is locked.
        start: first position to compute.
        reported: cached prompt tokens as the client sees them.
        copy_source: page whose content the first own page starts from (copy-on-write), or -1.
    """

    pages: Int32Array
    start: int
    reported: int
    copy_source: int


class RequestPages:
    """Moves pages between the pool, the radix tree and the rows of the request table."""

    def __init__(self, config: SchedulerConfig, table: RequestTable) -> None:
        self._page_size = config.page_size
        self._table = table
        self.pool = PagePool(config.num_pages, config.page_size)
        self.events = None if config.kv_events is None else KVEventLog(form=config.kv_events)
        self.cache = RadixCache(
            self.pool, policy=config.eviction_policy, enabled=config.enable_radix_cache, events=self.events
        )
        self.holds = Holds(self.pool, self.cache)
        self.evicted_pages = 0

    @property
    def num_available(self) -> int:
        """Pages that are free or can be made free without preempting a request."""
        return self.pool.num_free + self.cache.num_evictable_pages

    def evict(self, num_pages: int) -> int:
        """Reclaim up to ``num_pages`` cached pages; returns how many."""
        freed = self.cache.evict(num_pages)
        self.evicted_pages += freed
        return freed

    def reserve(self, num_pages: int) -> bool:
        """Make at least ``num_pages`` pages free, evicting as few as needed; False when that is impossible."""
        short = num_pages - self.pool.num_free
        if short <= 0:
            return True
        if short > self.cache.num_evictable_pages:
            return False
        self.evict(short)
        return self.pool.num_free >= num_pages

    def match_length(self, request: Request) -> int:
        """Cached prefix of a waiting request, in tokens; neither locks nor counts as a use."""
        return self.cache.match_length(request.tokens, request.namespace)

    def use_prefix(self, request: Request) -> PrefixUse:
        """Match and lock the cached prefix of a waiting request. Undone by ``unlock``."""
        tokens = request.tokens
        usable = len(tokens)
        if request.scored < request.prompt_length:
            # The log-probability of position p comes from the hidden state at p - 1, which a hit does not have.
            usable = max(request.scored - 1, 0)
        match = self.cache.match(tokens[:usable], request.namespace)
        if match.num_tokens == 0:
            return PrefixUse(match.pages, 0, 0, -1)
        self.cache.lock(match.node)
        request.node = match.node
        if match.num_tokens == len(tokens) and not self.num_available:
            # No page is left to copy the last one to, nor will one be if nothing else runs: compute that page again.
            self.unlock(request)
            match = self.cache.match(tokens[:-1], request.namespace)
            self.cache.lock(match.node)
            request.node = match.node
        if match.num_tokens < len(tokens):
            return PrefixUse(match.pages, match.num_tokens, match.num_tokens, -1)
        # Everything is cached, but drawing a token needs the last position computed, and its page is shared.
        last_page = int(match.pages[-1]) if self._page_size > 1 else -1
        return PrefixUse(match.pages[:-1], len(tokens) - 1, len(tokens), last_page)

    def unlock(self, request: Request) -> None:
        """Release the lock on the request's prefix, if it has one."""
        if request.node is not None:
            self.cache.unlock(request.node)
            request.node = None

    def attach(self, request: Request, prefix: PrefixUse, own: Int32Array) -> None:
        """Fill the page table of a freshly assigned row: the shared prefix, then its own pages."""
        row = request.row
        shared = len(prefix.pages)
        total = shared + len(own)
        self._table.page_table[row, :shared] = prefix.pages
        self._table.page_table[row, shared:total] = own
        self._table.shared_pages[row] = shared
        self._table.num_pages[row] = total

    def publish(self, request: Request, num_written: int) -> bool:
        """Give the full pages of the first ``num_written`` positions to the radix tree and keep using them.

        Where the tree has the same content already, the row changes over to the tree's pages and its own are
        released.

        Args:
            num_written: positions whose KV a committed plan has written.

        Returns:
            Whether entries of the row's page table changed.
        """
        if not self.cache.enabled:
            return False
        row, table = request.row, self._table
        count = num_written // self._page_size
        shared = int(table.shared_pages[row])
        if count <= shared:
            return False
        own = table.page_table[row, :count]
        tokens = table.token_ids[row, : count * self._page_size]
        result = self.cache.insert(tokens, own, request.namespace, request.priority)
        self.cache.lock(result.node)
        self.unlock(request)
        request.node = result.node
        swapped = result.existing_pages > shared
        if swapped:
            duplicates = own[shared : result.existing_pages].copy()
            table.page_table[row, :count] = result.pages
            self._give_up(request, duplicates)
        table.shared_pages[row] = count
        return swapped

    def release(self, request: Request, num_written: int) -> None:
        """Take all pages from a row that ends or is preempted.

        Args:
            num_written: positions whose content is worth keeping; their full pages are published, the rest is freed.
        """
        self.publish(request, num_written)
        row, table = request.row, self._table
        own = table.page_table[row, table.shared_pages[row] : table.num_pages[row]]
        if len(own):
            self._give_up(request, own.copy())
        table.num_pages[row] = table.shared_pages[row]
        if request.lent and request.node is not None:
            self.holds.keep(request.key, _NO_PAGES, request.node)
            request.node = None
        self.unlock(request)

    def return_incoming(self, request: Request) -> None:
        """Take the pages that a request without a row got for its prompt."""
        if request.incoming is not None:
            self._give_up(request, request.incoming)
            request.incoming = None

    def _give_up(self, request: Request, pages: Int32Array) -> None:
        """Pages (int32[n], a copy) that a request no longer has: free, unless its peer has a part in them."""
        if request.lent:
            self.holds.keep(request.key, pages)
        else:
            self.pool.release(pages)

    def audit(self, incoming: list[Int32Array]) -> None:
        """Check that every page has exactly one owner and that every lock belongs to a running request or a hold.

        Args:
            incoming: pages of requests without a row.

        Raises:
            AuditError: naming the pages or counts that disagree.
        """
        self.pool.audit()
        pool, table = self.pool, self._table
        held: list[Int32Array] = [*incoming, *self.holds.pages()]
        locks: dict[int, int] = {}
        for request in table.running():
            row = request.row
            shared, total = int(table.shared_pages[row]), int(table.num_pages[row])
            held.append(table.page_table[row, shared:total])
            if request.node is None and shared:
                raise AuditError(f"request {request.key} reads {shared} cached pages without a lock")
            _count_locks(locks, request.node)
        for locked in self.holds.nodes():
            _count_locks(locks, locked)
        pages = np.concatenate(held) if held else np.empty(0, dtype=np.int32)
        if len(np.unique(pages)) != len(pages):
            raise AuditError("a page is owned by two rows")
        if len(pages) != pool.num_held or (pool.owners(pages) != HELD).any():
            raise AuditError(f"the rows hold {len(pages)} pages, the pool counts {pool.num_held} held ones")
        cached = 0
        for tree_node in self.cache.nodes():
            cached += len(tree_node.pages)
            if tree_node.parent is not None and tree_node.lock_count != locks.get(id(tree_node), 0):
                raise AuditError(f"{tree_node} is locked by {locks.get(id(tree_node), 0)} running requests")
        if cached != self.cache.num_cached_pages or cached + len(pages) + pool.num_free != pool.num_pages:
            raise AuditError(
                f"free {pool.num_free} + cached {cached} + held {len(pages)} pages are not the pool's {pool.num_pages}"
            )


def _count_locks(locks: dict[int, int], node: Node | None) -> None:
    """Add a lock of a node, which locks those above it."""
    while node is not None and node.parent is not None:
        locks[id(node)] = locks.get(id(node), 0) + 1
        node = node.parent
