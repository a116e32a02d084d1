"""The prefix cache: a radix tree over whole pages of token ids.

A node holds a run of pages as one ``bytes`` object and one array of page ids, so following an edge is one memory
comparison however long it is, and only an edge that differs is searched for the page where it does. Sequences of
different namespaces (cache salt, adapter) never share a node: each namespace has its own root.

The tree owns the pages it holds. A request that uses some of them locks the node its match ended at; locks are
counts along the path to the root, and what is locked is not evicted. Pages of finished requests stay matchable until
``evict`` takes them back, in slices as small as the caller asks for.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec
import numpy as np

from sglang_lite.cache.block_hash import chain_digests
from sglang_lite.cache.errors import PageAccountingError
from sglang_lite.cache.events import KVEventLog
from sglang_lite.cache.eviction import EvictionPolicy, make_eviction_order
from sglang_lite.cache.namespace import hash_scheme
from sglang_lite.cache.node import DETACHED, NO_PAGES, Node, Root
from sglang_lite.cache.page_pool import PagePool
from sglang_lite.types import Int32Array

_TOKEN_BYTES: Final = 4


class PrefixMatch(msgspec.Struct, frozen=True, eq=False):
    """The longest cached prefix of a sequence, in whole pages.

    Attributes:
        node: where it ends; pass it to ``RadixCache.lock`` before anything else changes the cache.
        pages: int32[num_tokens / page_size], its pages; not to be written.
        num_tokens: its length.
    """

    node: Node
    pages: Int32Array
    num_tokens: int


class InsertResult(msgspec.Struct, frozen=True, eq=False):
    """What became of the pages of an inserted sequence.

    Attributes:
        node: where the sequence ends in the tree.
        existing_pages: how many leading pages the tree had already.
        pages: int32[k], the tree's pages for the whole sequence; not to be written. Empty when the cache is disabled.
    """

    node: Node
    existing_pages: int
    pages: Int32Array

    def duplicates(self, own_pages: Int32Array) -> Int32Array:
        """Those of the inserted pages that the tree did not take: the caller still owns them.

        Args:
            own_pages: int32[k], the pages given to ``insert``.

        Returns:
            int32[d] of the leading pages that differ from the tree's, and all of them when the cache is disabled.
        """
        known = len(self.pages)
        duplicates: Int32Array = np.concatenate((own_pages[:known][own_pages[:known] != self.pages], own_pages[known:]))
        return duplicates


class RadixCache:
    """Prefix cache over the pages of ``pool``.

    Args:
        pool: whose pages the tree takes over and gives back.
        policy: which unlocked leaf is evicted first: least recently used, least frequently used, first created, or
            lowest priority (least recently used among equals).
        enabled: False keeps nothing: every match is empty and ``insert`` takes no page.
        events: log that receives KV events; None collects none and hashes nothing.
    """

    def __init__(
        self,
        pool: PagePool,
        *,
        policy: EvictionPolicy = "lru",
        enabled: bool = True,
        events: KVEventLog | None = None,
    ) -> None:
        self.pool: Final = pool
        self.enabled: Final = enabled
        self.events: Final = events
        self._page_size: Final = pool.page_size
        self._page_bytes: Final = pool.page_size * _TOKEN_BYTES
        self._order: Final = make_eviction_order(policy)
        self._roots: dict[str, Root] = {}
        self._nowhere: Final = Root("")
        self._clock = 0
        self._num_cached = 0
        self._num_evictable = 0

    @property
    def num_cached_pages(self) -> int:
        """Pages in the tree."""
        return self._num_cached

    @property
    def num_evictable_pages(self) -> int:
        """Pages in the tree that no lock protects."""
        return self._num_evictable

    def match(self, token_ids: Int32Array, namespace: str = "") -> PrefixMatch:
        """Find the longest cached prefix and count it as used.

        A prefix that ends inside a run splits the run there, so that a lock protects the prefix and no more.

        Args:
            token_ids: int32[n]; a last incomplete page is ignored.
            namespace: whose sequences to look at.
        """
        root = self._roots.get(namespace)
        if root is None:
            return PrefixMatch(self._nowhere, NO_PAGES, 0)
        data = self._whole_pages(token_ids)
        path, matched, partial = self._descend(root, data)
        if partial is not None:
            upper = self._split(partial, self._common_pages(partial, data, matched))
            matched += len(upper.key)
            path.append(upper)
        if not path:
            return PrefixMatch(root, NO_PAGES, 0)
        self._order.use(path, hit=True)
        return PrefixMatch(path[-1], _gather(path), matched // _TOKEN_BYTES)

    def match_length(self, token_ids: Int32Array, namespace: str = "") -> int:
        """Tokens that ``match`` would find, without counting as a use and without changing the tree."""
        root = self._roots.get(namespace)
        if root is None:
            return 0
        data = self._whole_pages(token_ids)
        _, matched, partial = self._descend(root, data)
        if partial is not None:
            matched += self._common_pages(partial, data, matched) * self._page_bytes
        return matched // _TOKEN_BYTES

    def lock(self, node: Node) -> None:
        """Protect a node and everything above it from eviction. Locks add up.

        Raises:
            PageAccountingError: the node has left the tree since it was matched.
        """
        if node.lock_count == DETACHED:
            raise PageAccountingError("radix cache: cannot lock a node that was evicted; match the sequence again")
        while node.parent is not None:
            if node.lock_count == 0:
                self._order.remove(node)
                self._num_evictable -= len(node.pages)
            node.lock_count += 1
            node = node.parent

    def unlock(self, node: Node) -> None:
        """Take back one ``lock`` of this node. What is protected no more counts as used just now.

        Raises:
            PageAccountingError: the node is not locked.
        """
        if (node.parent is not None and node.lock_count <= 0) or node.lock_count == DETACHED:
            raise PageAccountingError("radix cache: cannot unlock a node that is not locked")
        while node.parent is not None:
            node.lock_count -= 1
            if node.lock_count == 0:
                self._order.add(node)
                self._num_evictable += len(node.pages)
            node = node.parent

    def insert(self, token_ids: Int32Array, pages: Int32Array, namespace: str = "", priority: int = 0) -> InsertResult:
        """Make a sequence matchable; the tree takes over the pages of the part it does not have yet.

        Args:
            token_ids: int32[k * page_size].
            pages: int32[k]. The first ``existing_pages`` of them may be the tree's own or duplicates, which the caller
                keeps (see ``InsertResult.duplicates``); the others must be held and become cached. Not kept: the
                caller may go on writing to the array.
            namespace: who may match it.
            priority: for the priority policy; the nodes on the way keep the highest seen.

        Raises:
            ValueError: lengths do not fit.
            PageAccountingError: a page to take over is not held; the tree is unchanged.
        """
        if len(token_ids) != len(pages) * self._page_size:
            raise ValueError(
                f"radix cache: {len(token_ids)} tokens do not fill {len(pages)} pages of {self._page_size}; "
                "insert whole pages only"
            )
        root = self._roots.get(namespace) or Root(namespace)
        if not self.enabled or len(pages) == 0:
            return InsertResult(self._nowhere, 0, NO_PAGES)
        data = self._whole_pages(token_ids)
        path, matched, partial = self._descend(root, data)
        common = 0 if partial is None else self._common_pages(partial, data, matched)
        existing = matched // self._page_bytes + common
        own: Int32Array = pages[existing:].astype(np.int32)
        # First of all, because it refuses pages that are not the caller's to give.
        if len(own):
            self.pool.adopt(own)
        if partial is not None:
            path.append(self._split(partial, common))
        self._order.raise_priority(path, priority)
        leaf = self._append(path[-1] if path else root, data, own, priority) if len(own) else None
        self._order.use(path, hit=False)
        if leaf is not None:
            path.append(leaf)
            self._roots[namespace] = root
        return InsertResult(path[-1], existing, _gather(path))

    def evict(self, num_pages: int) -> int:
        """Give up to ``num_pages`` unlocked pages back to the pool, leaves first, in the order of the policy.

        The last leaf is shortened rather than evicted whole, so a call frees no more than asked.

        Returns:
            Pages freed; fewer than asked only when nothing evictable is left.
        """
        freed: list[Int32Array] = []
        remaining = num_pages
        while remaining > 0 and (node := self._order.first()) is not None:
            if len(node.pages) <= remaining:
                freed.append(node.pages)
                self._detach(node)
            else:
                freed.append(self._trim(node, remaining))
            remaining -= len(freed[-1])
        self._reclaim(freed)
        return num_pages - remaining if freed else 0

    def flush(self, namespace: str | None = None) -> int:
        """Give back everything that is not locked, of one namespace or of all.

        Returns:
            Pages freed. The cache is empty afterwards if and only if nothing was locked.
        """
        if namespace is None:
            roots = list(self._roots.values())
        else:
            roots = [root for root in [self._roots.get(namespace)] if root is not None]
        freed: list[Int32Array] = []
        for root in roots:
            for node in reversed(list(_subtree(root))):
                if node.parent is not None and node.lock_count == 0:
                    freed.append(node.pages)
                    self._detach(node)
        self._reclaim(freed)
        if self.events is not None and self._num_cached == 0 and (freed or namespace is None):
            self.events.cleared()
        return sum(map(len, freed))

    def nodes(self) -> Iterator[Node]:
        """All nodes, roots included, parents before their children. The tree must not change meanwhile."""
        for root in self._roots.values():
            yield from _subtree(root)

    def _whole_pages(self, token_ids: Int32Array) -> bytes:
        if token_ids.dtype.itemsize != _TOKEN_BYTES:
            raise TypeError(f"radix cache: token_ids must be int32, not {token_ids.dtype}")
        return token_ids[: len(token_ids) // self._page_size * self._page_size].tobytes()

    def _descend(self, root: Node, data: bytes) -> tuple[list[Node], int, Node | None]:
        """Follow whole runs from ``root``: nodes passed, bytes matched, and the child whose run differs later on."""
        path: list[Node] = []
        node, position, page_bytes = root, 0, self._page_bytes
        while position < len(data):
            child = node.children.get(data[position : position + page_bytes])
            if child is None:
                break
            if not data.startswith(child.key, position):
                return path, position, child
            path.append(child)
            position += len(child.key)
            node = child
        return path, position, None

    def _common_pages(self, node: Node, data: bytes, position: int) -> int:
        """Leading pages of the node's run that equal ``data`` from ``position`` on; not the whole run."""
        count = min(len(node.key), len(data) - position) // _TOKEN_BYTES
        run = np.frombuffer(node.key, dtype=np.int32, count=count)
        wanted = np.frombuffer(data, dtype=np.int32, count=count, offset=position)
        differs = run != wanted
        first = int(differs.argmax())
        return (first if differs[first] else count) // self._page_size

    def _split(self, node: Node, num_pages: int) -> Node:
        """Cut a run in two; the lower part stays ``node``, so locks taken on it still cover both. Returns the upper.

        Token bytes and page ids are copied: a view would keep the long array alive for as long as the short one.
        """
        parent = node.parent
        assert parent is not None
        cut = num_pages * self._page_bytes
        upper = self._new_node(node.key[:cut], node.pages[:num_pages].copy(), parent, node.priority)
        upper.created, upper.hits, upper.lock_count = node.created, node.hits, node.lock_count
        upper.digests, node.digests = node.digests[:num_pages], node.digests[num_pages:]
        node.key = node.key[cut:]
        node.pages = _read_only(node.pages[num_pages:].copy())
        node.parent = upper
        parent.children[upper.key[: self._page_bytes]] = upper
        upper.children[node.key[: self._page_bytes]] = node
        if upper.lock_count == 0:
            self._order.add(upper)
        return upper

    def _append(self, parent: Node, data: bytes, own: Int32Array, priority: int) -> Node:
        """Hang the last ``len(own)`` pages of ``data`` under ``parent`` as a new leaf."""
        leaf = self._new_node(data[len(data) - len(own) * self._page_bytes :], own, parent, priority)
        parent.children[leaf.key[: self._page_bytes]] = leaf
        self._num_cached += len(own)
        self._num_evictable += len(own)
        self._order.add(leaf)
        if self.events is not None:
            self._record_stored(self.events, leaf, parent)
        return leaf

    def _new_node(self, key: bytes, pages: Int32Array, parent: Node, priority: int) -> Node:
        self._clock += 1
        return Node(key, _read_only(pages), parent, created=self._clock, serial=self._clock, priority=priority)

    def _detach(self, node: Node) -> None:
        """Take an unlocked leaf out of the tree."""
        parent = node.parent
        assert parent is not None
        if self.events is not None:
            self.events.removed(node.digests, _root_of(node).namespace)
        self._order.remove(node)
        del parent.children[node.key[: self._page_bytes]]
        node.parent = None
        node.lock_count = DETACHED
        if not parent.children:
            if isinstance(parent, Root):
                del self._roots[parent.namespace]
            elif parent.lock_count == 0:
                self._order.exposed(parent)

    def _trim(self, node: Node, num_pages: int) -> Int32Array:
        """Cut the last pages off an unlocked leaf and return them."""
        kept = len(node.pages) - num_pages
        freed = node.pages[kept:]
        node.pages = node.pages[:kept]
        node.key = node.key[: kept * self._page_bytes]
        if self.events is not None:
            self.events.removed(node.digests[kept:], _root_of(node).namespace)
            del node.digests[kept:]
        return freed

    def _reclaim(self, freed: list[Int32Array]) -> None:
        if not freed:
            return
        pages = freed[0] if len(freed) == 1 else np.concatenate(freed)
        self.pool.reclaim(pages)
        self._num_cached -= len(pages)
        self._num_evictable -= len(pages)

    def _record_stored(self, events: KVEventLog, leaf: Node, parent: Node) -> None:
        namespace = _root_of(parent).namespace
        before = parent.digests[-1] if parent.digests else b""
        start = before or hash_scheme(namespace, events.form).start
        leaf.digests = chain_digests(leaf.key, self._page_size, start)
        tokens = np.frombuffer(leaf.key, dtype=np.int32).tolist()
        events.stored(tokens, leaf.digests, before, self._page_size, namespace)


def _root_of(node: Node) -> Root:
    while node.parent is not None:
        node = node.parent
    assert isinstance(node, Root)
    return node


def _read_only(pages: Int32Array) -> Int32Array:
    pages.setflags(write=False)
    return pages


def _gather(path: list[Node]) -> Int32Array:
    if len(path) == 1:
        return path[0].pages
    pages: Int32Array = np.concatenate([node.pages for node in path])
    return pages


def _subtree(root: Node) -> Iterator[Node]:
    """The node and all below it, parents before their children."""
    pending = [root]
    while pending:
        node = pending.pop()
        yield node
        pending.extend(node.children.values())
