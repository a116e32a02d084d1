"""The waiting queue under fair scheduling: the tenant that was served least goes first."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

from sglang_lite.scheduler.config import SchedulerConfig
from sglang_lite.scheduler.fairness import TenantCounters
from sglang_lite.scheduler.queue import WaitingQueue, _Entry
from sglang_lite.scheduler.request import Request, RequestState


class FairQueue(WaitingQueue):
    """A queue for each tenant, in the order of the policy; between them, the counters decide.

    Nobody starves: a tenant that waits is not charged, so the others pass it sooner or later. There is no limit by age
    as in the other queues, because the oldest request is that of the flood.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        self._counters = TenantCounters()
        self._of_tenant: dict[int, list[_Entry]] = {}

    @property
    def tenants(self) -> TenantCounters:
        """Who was served how much."""
        return self._counters

    def push(self, request: Request) -> None:
        """Add a request, whose ``tenant`` is set."""
        super().push(request)
        self._counters.arrive(request.tenant)
        entry = self._entries[request.order][0]
        heapq.heappush(self._of_tenant.setdefault(request.tenant, []), entry)

    def remove(self, request: Request) -> None:
        """Take a request out: it runs now, or it ended."""
        super().remove(request)
        self._counters.leave(request.tenant)
        waiting = int(self._counters.waiting[request.tenant])
        heap = self._of_tenant[request.tenant]
        if not waiting:
            del self._of_tenant[request.tenant]
        elif len(heap) > 2 * waiting + 64:
            alive = [entry for entry in heap if entry[2] is not None]
            heapq.heapify(alive)
            self._of_tenant[request.tenant] = alive

    def candidates(self, match_length: Callable[[Request], int]) -> Iterator[Request]:
        """Requests in the order in which they should run; ends when the caller leaves one of them in the queue."""
        while self._entries:
            head = self._head(self._of_tenant[self._counters.least_served()])
            if head is None:
                return
            yield head
            if head.order in self._entries:
                return

    def newest_of_heaviest(self) -> Request | None:
        """The last request, never run, of the tenant that waits with the most requests for its weight."""
        entries = self._of_tenant.get(self._counters.heaviest(), [])
        new = [entry[2] for entry in entries if entry[2] is not None and entry[2].state is RequestState.NEW]
        return max(new, key=lambda request: request.order, default=None)
