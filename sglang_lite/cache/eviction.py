"""Orders of eviction, kept up to date with every use so that finding the next victim costs no search.

An order knows the unlocked nodes of the tree and names the leaf to evict next. The recency orders need no heap of
leaves, because a use of a node is a use of all its ancestors: when a path is moved to the back from its deep end to
its root, every node stands behind all its descendants, and whatever stands in front is a leaf.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final, Literal, Protocol

from sglang_lite.cache.node import Node

EvictionPolicy = Literal["lru", "lfu", "fifo", "priority"]
EVICTION_POLICIES: Final[tuple[EvictionPolicy, ...]] = ("lru", "lfu", "fifo", "priority")

_STALE_ENTRIES: Final = 64


class EvictionOrder(Protocol):
    """What the tree tells an order, and asks of it."""

    def add(self, node: Node) -> None:
        """The node is new or lost its last lock; of several nodes the deepest comes first."""

    def remove(self, node: Node) -> None:
        """The node is locked or leaves the tree."""

    def use(self, path: Sequence[Node], *, hit: bool) -> None:
        """The nodes from the top of the tree downwards were matched (``hit``) or inserted over."""

    def raise_priority(self, path: Sequence[Node], priority: int) -> None:
        """A sequence through these nodes was inserted with that priority; followed by ``use``."""

    def exposed(self, node: Node) -> None:
        """The unlocked node lost its last child."""

    def first(self) -> Node | None:
        """The unlocked leaf to evict next, or None."""

    def clear(self) -> None:
        """Forget all nodes."""


class RecencyOrder:
    """Least recently used first."""

    def __init__(self) -> None:
        self._nodes: OrderedDict[Node, None] = OrderedDict()

    def add(self, node: Node) -> None:
        self._nodes[node] = None

    def remove(self, node: Node) -> None:
        del self._nodes[node]

    def use(self, path: Sequence[Node], *, hit: bool) -> None:
        move_to_end = self._nodes.move_to_end
        for node in reversed(path):
            node.hits += hit
            if node.lock_count == 0:
                move_to_end(node)

    def raise_priority(self, path: Sequence[Node], priority: int) -> None:
        for node in path:
            node.priority = max(node.priority, priority)

    def exposed(self, node: Node) -> None:
        pass

    def first(self) -> Node | None:
        return next(iter(self._nodes), None)

    def clear(self) -> None:
        self._nodes.clear()


class RankedOrder:
    """Lowest rank first, least recently used first within a rank.

    A node's rank is never below that of a child, so the first node of the lowest rank is a leaf.

    Args:
        rank: ``hits`` (least frequently used) or ``priority``.
    """

    def __init__(self, rank: Literal["hits", "priority"]) -> None:
        self._by_hits = rank == "hits"
        self._buckets: dict[int, OrderedDict[Node, None]] = {}
        # Every rank that has a bucket, and some that had one: cleaned when they outnumber the buckets.
        self._ranks: list[int] = []

    def add(self, node: Node) -> None:
        rank = node.hits if self._by_hits else node.priority
        bucket = self._buckets.get(rank)
        if bucket is None:
            bucket = self._buckets[rank] = OrderedDict()
            heapq.heappush(self._ranks, rank)
            if len(self._ranks) > 2 * len(self._buckets) + _STALE_ENTRIES:
                self._ranks = sorted(self._buckets)
        bucket[node] = None

    def remove(self, node: Node) -> None:
        rank = node.hits if self._by_hits else node.priority
        bucket = self._buckets[rank]
        del bucket[node]
        if not bucket:
            del self._buckets[rank]

    def use(self, path: Sequence[Node], *, hit: bool) -> None:
        for node in reversed(path):
            if node.lock_count == 0:
                self.remove(node)
                node.hits += hit
                self.add(node)
            else:
                node.hits += hit

    def raise_priority(self, path: Sequence[Node], priority: int) -> None:
        for node in reversed(path):
            if node.priority >= priority:
                continue
            if node.lock_count == 0:
                self.remove(node)
                node.priority = priority
                self.add(node)
            else:
                node.priority = priority

    def exposed(self, node: Node) -> None:
        pass

    def first(self) -> Node | None:
        while self._ranks:
            bucket = self._buckets.get(self._ranks[0])
            if bucket is not None:
                return next(iter(bucket))
            heapq.heappop(self._ranks)
        return None

    def clear(self) -> None:
        self._buckets.clear()
        self._ranks.clear()


def _is_victim(node: Node) -> bool:
    return node.lock_count == 0 and not node.children


class CreationOrder:
    """First created, first evicted: a heap of leaves.

    Creation times never change, so an entry can only become void (the node got locked, got a child, or left the
    tree). Void entries are dropped when they come up or when the heap has doubled; a node has at most one entry.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Node]] = []
        self._sweep_at = _STALE_ENTRIES

    def add(self, node: Node) -> None:
        if node.in_heap or node.children:
            return
        if len(self._heap) >= self._sweep_at:
            self._sweep()
        node.in_heap = True
        heapq.heappush(self._heap, (node.created, node.serial, node))

    def _sweep(self) -> None:
        kept = []
        for entry in self._heap:
            entry[2].in_heap = _is_victim(entry[2])
            if entry[2].in_heap:
                kept.append(entry)
        heapq.heapify(kept)
        self._heap = kept
        self._sweep_at = 2 * len(kept) + _STALE_ENTRIES

    def remove(self, node: Node) -> None:
        pass

    def use(self, path: Sequence[Node], *, hit: bool) -> None:
        for node in path:
            node.hits += hit

    def raise_priority(self, path: Sequence[Node], priority: int) -> None:
        for node in path:
            node.priority = max(node.priority, priority)

    def exposed(self, node: Node) -> None:
        self.add(node)

    def first(self) -> Node | None:
        while self._heap:
            node = self._heap[0][2]
            if _is_victim(node):
                return node
            heapq.heappop(self._heap)
            node.in_heap = False
        return None

    def clear(self) -> None:
        for _, _, node in self._heap:
            node.in_heap = False
        self._heap.clear()


def make_eviction_order(policy: EvictionPolicy) -> EvictionOrder:
    """The order of the named policy."""
    match policy:
        case "lru":
            return RecencyOrder()
        case "lfu":
            return RankedOrder("hits")
        case "priority":
            return RankedOrder("priority")
        case "fifo":
            return CreationOrder()
        case _:
            raise ValueError(f"eviction policy is {policy!r}; allowed are {', '.join(EVICTION_POLICIES)}")
