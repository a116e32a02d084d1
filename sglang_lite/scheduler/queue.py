"""The waiting queue: new and preempted requests in the order of the policy, with bounded starvation."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from sglang_lite.scheduler.config import SchedulerConfig
from sglang_lite.scheduler.fairness import TenantCounters
from sglang_lite.scheduler.request import Request

_LOOKAHEAD = 64
"""Waiting requests that the longest-prefix policy compares, the oldest first: bounds the work of a plan."""

# [rank, number of the push, request or None]: the number is unique, so requests are never compared. A rank ends with
# the arrival number. None marks an entry whose request left.
_Entry = list[Any]


class WaitingQueue:
    """Requests without a row. A preempted request keeps its arrival number, so it returns to the head of its class."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._heap: list[_Entry] = []
        self._by_age: list[_Entry] = []
        self._entries: dict[int, tuple[_Entry, _Entry]] = {}
        self._num_pushed = 0
        self.num_tokens = 0
        self.num_admitted = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def tenants(self) -> TenantCounters | None:
        """Who was served how much; None without fair scheduling."""
        return None

    def rank(self, request: Request) -> tuple[int, int]:
        """Sort key among requests: the smallest runs first and is preempted last."""
        if self._config.policy != "priority":
            return (0, request.order)
        return (request.priority if self._config.low_priority_first else -request.priority, request.order)

    def push(self, request: Request) -> None:
        """Add a request."""
        self._num_pushed += 1
        entry: _Entry = [self.rank(request), self._num_pushed, request]
        aged: _Entry = [request.order, self._num_pushed, request]
        self._entries[request.order] = (entry, aged)
        heapq.heappush(self._heap, entry)
        heapq.heappush(self._by_age, aged)
        self.num_tokens += len(request.tokens)

    def remove(self, request: Request) -> None:
        """Take a request out: it runs now, or it ended."""
        for entry in self._entries.pop(request.order):
            entry[2] = None
        self.num_tokens -= len(request.tokens)
        self._heap = self._compacted(self._heap)
        self._by_age = self._compacted(self._by_age)

    def oldest(self) -> Request | None:
        """The request that arrived first."""
        return self._head(self._by_age)

    def ordered(self, requests: Sequence[Request]) -> Sequence[Request]:
        """``requests`` that wait elsewhere, the oldest first, in the order in which they should be served."""
        if self._config.policy != "priority" or len(requests) < 2:
            return requests
        starved = [request for request in requests if self._has_starved(request)]
        others = [request for request in requests if not self._has_starved(request)]
        return [*starved, *sorted(others, key=self.rank)]

    def requests(self) -> list[Request]:
        """All waiting requests, the oldest first."""
        return [self._entries[order][0][2] for order in sorted(self._entries)]

    def candidates(self, match_length: Callable[[Request], int]) -> Iterator[Request]:
        """Requests in the order in which they should run; ends when the caller leaves one of them in the queue.

        Args:
            match_length: cached prefix of a request in tokens, for the longest-prefix policy.
        """
        while self._entries:
            starving = self._starving()
            if starving is not None:
                yield starving
                if starving.order in self._entries:
                    return
                continue
            if self._config.policy == "lpm":
                yield from self._longest_prefix_first(match_length)
                return
            head = self._head(self._heap)
            if head is None:
                return
            yield head
            if head.order in self._entries:
                return

    def _longest_prefix_first(self, match_length: Callable[[Request], int]) -> Iterator[Request]:
        first: list[_Entry] = []
        while self._heap and len(first) < _LOOKAHEAD:
            entry = heapq.heappop(self._heap)
            if entry[2] is not None:
                first.append(entry)
        for entry in first:
            heapq.heappush(self._heap, entry)
        oldest: list[Request] = [entry[2] for entry in first]
        oldest.sort(key=lambda request: (-match_length(request), request.order))
        for request in oldest:
            yield request
            if request.order in self._entries:
                return

    def _starving(self) -> Request | None:
        if self._config.policy == "fcfs":
            return None
        oldest = self.oldest()
        return oldest if oldest is not None and self._has_starved(oldest) else None

    def _has_starved(self, request: Request) -> bool:
        return self.num_admitted - request.admitted_before >= self._config.starvation_limit

    @staticmethod
    def _head(heap: list[_Entry]) -> Request | None:
        while heap and heap[0][2] is None:
            heapq.heappop(heap)
        if not heap:
            return None
        request: Request = heap[0][2]
        return request

    def _compacted(self, heap: list[_Entry]) -> list[_Entry]:
        if len(heap) <= 2 * len(self._entries) + 64:
            return heap
        alive = [entry for entry in heap if entry[2] is not None]
        heapq.heapify(alive)
        return alive
