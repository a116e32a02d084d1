"""Requests whose prompt is computed by one server and continued by another: what the scheduler keeps of them.

A *held* request waits for its peer and is in no queue. Pages that a peer may still read or write outlive their request
in a *hold*, until whoever moves the bytes says that they are quiet.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from sglang_lite.cache import Node, PagePool, RadixCache
from sglang_lite.scheduler.outputs import concatenate_outputs
from sglang_lite.scheduler.request import Request
from sglang_lite.types import Int32Array, OutputColumns

if TYPE_CHECKING:
    from sglang_lite.scheduler.table import RequestTable


@dataclass(frozen=True, slots=True)
class WrittenPages:
    """Pages of a prompt that a committed plan has completed.

    Attributes:
        first_page: number of ``pages[0]`` within the sequence; records of a key follow one another without gap.
        pages: int32[n].
    """

    key: int
    first_page: int
    pages: Int32Array


@dataclass(slots=True)
class _Hold:
    pages: list[Int32Array] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)


class Holds:
    """Pages, and locks on cached ones, that belong to a transfer and to no request any more."""

    def __init__(self, pool: PagePool, cache: RadixCache) -> None:
        self._pool = pool
        self._cache = cache
        self._holds: dict[int, _Hold] = {}

    def __len__(self) -> int:
        return len(self._holds)

    def keep(self, key: int, pages: Int32Array, node: Node | None = None) -> None:
        """Take pages (int32[n], a copy) and a locked node over from a request."""
        hold = self._holds.setdefault(key, _Hold())
        if len(pages):
            hold.pages.append(pages)
        if node is not None:
            hold.nodes.append(node)

    def release(self, key: int) -> bool:
        """Give back what is held for a key; whether there was something."""
        hold = self._holds.pop(key, None)
        if hold is None:
            return False
        for pages in hold.pages:
            self._pool.release(pages)
        for node in hold.nodes:
            self._cache.unlock(node)
        return True

    def pages(self) -> list[Int32Array]:
        """What is held, for the audit."""
        return [pages for hold in self._holds.values() for pages in hold.pages]

    def nodes(self) -> list[Node]:
        """What is locked, for the audit."""
        return [node for hold in self._holds.values() for node in hold.nodes]


class Transfers:
    """Requests of a scheduler that have a peer.

    Attributes:
        held: key -> request that waits for its peer, the oldest first.
        arrived: requests whose prompt is here and that wait for a row, in the order in which the prompts came.
        ended: keys of requests that ended, however they did, since they were last taken.
        written: pages that committed plans completed, since they were last taken.
    """

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self.held: dict[int, Request] = {}
        self.arrived: list[Request] = []
        self.ended: list[int] = []
        self.written: list[WrittenPages] = []
        self._outputs: OutputColumns | None = None

    def __len__(self) -> int:
        return len(self.held) + len(self.arrived)

    @property
    def num_tokens(self) -> int:
        """Prompt tokens of those that wait."""
        return sum(len(request.tokens) for request in (*self.held.values(), *self.arrived))

    def incoming(self) -> list[Int32Array]:
        """Pages reserved for prompts on their way, or that are here and wait for a row."""
        waiting = (*self.held.values(), *self.arrived)
        return [request.incoming for request in waiting if request.incoming is not None]

    def forget(self, request: Request) -> None:
        """A held or arrived request leaves."""
        if self.held.pop(request.key, None) is None:
            self.arrived.remove(request)

    def note_written(self, table: RequestTable, request: Request, stop: int, *, completes: bool) -> None:
        """A committed chunk ends at position ``stop``: note the pages that are complete, and the rest at the end."""
        count = -(-stop // self._page_size) if completes else stop // self._page_size
        first = request.sent_pages
        if count > first:
            pages: Int32Array = table.page_table[request.row, first:count].copy()
            self.written.append(WrittenPages(request.key, first, pages))
            request.sent_pages = count

    def take_written(self) -> list[WrittenPages]:
        """What was noted since the last call."""
        written, self.written = self.written, []
        return written

    def take_ended(self) -> list[int]:
        """Keys noted since the last call."""
        ended, self.ended = self.ended, []
        return ended

    def report(self, columns: OutputColumns) -> None:
        """Rows to be sent with the next ones that no commit makes."""
        self._outputs = columns if self._outputs is None else concatenate_outputs(self._outputs, columns)

    def drain(self) -> OutputColumns | None:
        """Rows that were reported."""
        outputs, self._outputs = self._outputs, None
        return outputs


NO_PAGES: Int32Array = np.empty(0, dtype=np.int32)
