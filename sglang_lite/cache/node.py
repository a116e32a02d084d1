"""A node of the radix tree."""

from __future__ import annotations

from typing import Final

import numpy as np

from sglang_lite.types import Int32Array

DETACHED: Final = -1
NO_PAGES: Final[Int32Array] = np.empty(0, dtype=np.int32)
NO_PAGES.setflags(write=False)


class Node:
    """One edge of the tree and the point it leads to: a run of whole pages after the parent's run.

    Attributes:
        key: token ids of the run as bytes (four per token), a whole number of pages; empty for a root.
        pages: int32[len(key) / page bytes], read-only, the pages that hold them.
        parent: None for a root and for a node that left the tree.
        children: first page of a child's run, as bytes -> child.
        lock_count: how many locks protect the node; at least the count of each of its children. ``DETACHED`` once
            the node has left the tree.
        hits: how often a match ended at or went through the node.
        priority: highest priority with which a sequence through the node was inserted.
        created: logical time at which the run entered the tree.
        serial: unique number of the node, for ties.
        in_heap: whether the creation-order heap has an entry for the node.
        digests: one hash digest per page while KV events are collected, else empty.
    """

    __slots__ = (
        "children",
        "created",
        "digests",
        "hits",
        "in_heap",
        "key",
        "lock_count",
        "pages",
        "parent",
        "priority",
        "serial",
    )

    def __init__(
        self,
        key: bytes,
        pages: Int32Array,
        parent: Node | None,
        *,
        created: int,
        serial: int,
        priority: int,
        hits: int = 0,
        lock_count: int = 0,
    ) -> None:
        self.key = key
        self.pages = pages
        self.parent = parent
        self.children: dict[bytes, Node] = {}
        self.lock_count = lock_count
        self.hits = hits
        self.priority = priority
        self.created = created
        self.serial = serial
        self.in_heap = False
        self.digests: list[bytes] = []

    def __repr__(self) -> str:
        return f"Node({len(self.pages)} pages, {len(self.children)} children, {self.lock_count} locks)"


class Root(Node):
    """The root of one namespace: no run, no parent, never locked or evicted."""

    __slots__ = ("namespace",)

    def __init__(self, namespace: str) -> None:
        super().__init__(b"", NO_PAGES, None, created=0, serial=0, priority=0)
        self.namespace = namespace
