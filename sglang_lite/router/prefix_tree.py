"""Which workers have seen which beginnings: an edge-compressed tree over bytes, tagged with sets of workers.

An edge is compared as a whole; only where it differs is the place looked for, by halving. Sets of workers are bits of
an integer. The least recently used leaves go when the tree is too large.
"""

from __future__ import annotations

import heapq

PAGE = 16
"""Bytes that tell siblings apart; beginnings are compared in steps of this length."""

_NODE_BYTES = 320
"""What an edge costs beside its key, about: many short prompts would take twenty times their length."""


class _Node:
    __slots__ = ("children", "key", "parent", "stamp", "workers")

    def __init__(self, key: bytes, parent: _Node | None, workers: int, stamp: int) -> None:
        self.key = key
        self.parent = parent
        self.workers = workers
        self.stamp = stamp
        self.children: dict[bytes, _Node] = {}


class PrefixTree:
    """The tree of one model.

    Args:
        capacity: bytes of all edges together, with what they cost beside their keys.

    Attributes:
        size: bytes of all keys of edges.
    """

    def __init__(self, capacity: int) -> None:
        self._root = _Node(b"", None, 0, 0)
        self._capacity = capacity
        self._clock = 0
        self._serial = 0
        self._leaves: list[tuple[int, int, _Node]] = []  # lazy: an entry may be out of date
        self.size = 0
        self._nodes = 0

    def match(self, key: bytes, workers: int) -> tuple[int, int]:
        """The longest beginning of ``key`` that one of ``workers`` (bits) has seen.

        Returns:
            Its length in bytes, and the bits of the workers that have it; (0, 0) when none has any.
        """
        node, offset, found = self._root, 0, 0
        while child := node.children.get(key[offset : offset + PAGE]):
            holders = child.workers & workers
            if not holders:
                break
            found = holders
            if not key.startswith(child.key, offset):
                offset += _common_pages(child.key, key, offset)
                break
            offset += len(child.key)
            node = child
        return (offset, found) if found else (0, 0)

    def insert(self, key: bytes, worker: int) -> None:
        """``worker`` (a bit number) has now seen ``key``, whose last incomplete page is left out."""
        key = key[: len(key) - len(key) % PAGE]
        bit = 1 << worker
        self._clock += 1
        node, offset = self._root, 0
        while offset < len(key):
            page = key[offset : offset + PAGE]
            child = node.children.get(page)
            if child is None:
                child = _Node(key[offset:], node, bit, self._clock)
                node.children[page] = child
                self.size += len(child.key)
                self._nodes += 1
                self._push(child)
                break
            if not key.startswith(child.key, offset):
                child = self._split(child, _common_pages(child.key, key, offset))
            child.workers |= bit
            child.stamp = self._clock
            offset += len(child.key)
            node = child
        if self._bytes > self._capacity:
            self._evict()

    @property
    def _bytes(self) -> int:
        return self.size + _NODE_BYTES * self._nodes

    def remove_worker(self, worker: int) -> None:
        """Forget all that ``worker`` has seen."""
        keep = ~(1 << worker)
        stack = [self._root]
        leaves: list[tuple[int, int, _Node]] = []
        while stack:
            node = stack.pop()
            for page, child in list(node.children.items()):
                child.workers &= keep
                if child.workers:
                    stack.append(child)
                else:  # whoever has a long beginning has the shorter ones: nobody is left below either
                    self._drop(child)
                    del node.children[page]
            if not node.children and node.parent is not None:
                leaves.append((node.stamp, len(leaves), node))
        heapq.heapify(leaves)
        self._leaves, self._serial = leaves, len(leaves)  # the old entries would keep what is gone

    def _split(self, node: _Node, length: int) -> _Node:
        """Cut ``node`` after ``length`` bytes; returns the new upper part."""
        parent = node.parent
        assert parent is not None
        upper = _Node(node.key[:length], parent, node.workers, node.stamp)
        parent.children[node.key[:PAGE]] = upper
        node.key = node.key[length:]
        node.parent = upper
        upper.children[node.key[:PAGE]] = node
        self._nodes += 1
        return upper

    def _push(self, node: _Node) -> None:
        self._serial += 1
        heapq.heappush(self._leaves, (node.stamp, self._serial, node))

    def _drop(self, node: _Node) -> None:
        """Take a subtree out of the accounts."""
        stack = [node]
        while stack:
            gone = stack.pop()
            self.size -= len(gone.key)
            self._nodes -= 1
            gone.parent = None
            stack.extend(gone.children.values())

    def _evict(self) -> None:
        """Leaves go until a tenth of the capacity is free, so that this runs seldom."""
        goal = self._capacity - self._capacity // 10
        while self._bytes > goal and self._leaves:
            stamp, _, node = heapq.heappop(self._leaves)
            parent = node.parent
            if parent is None or node.children:
                continue
            if node.stamp != stamp:
                self._push(node)
                continue
            del parent.children[node.key[:PAGE]]
            node.parent = None
            self.size -= len(node.key)
            self._nodes -= 1
            if not parent.children and parent.parent is not None:
                self._push(parent)


def _common_pages(edge: bytes, key: bytes, offset: int) -> int:
    """Length of the common beginning of ``edge`` and ``key[offset:]`` in whole pages; they differ somewhere."""
    low, high = 0, len(edge) // PAGE
    while low + 1 < high:
        middle = (low + high) // 2
        if key.startswith(edge[low * PAGE : middle * PAGE], offset + low * PAGE):
            low = middle
        else:
            high = middle
    return low * PAGE
