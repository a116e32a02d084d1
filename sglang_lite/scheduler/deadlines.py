"""Time limits of requests: a heap of deadlines, with the clock as an argument."""

from __future__ import annotations

import heapq

from sglang_lite.scheduler.request import Request, RequestState
from sglang_lite.types import FinishCode

_WAITING_ONLY = 0
_ALWAYS = 1

_Entry = tuple[float, int, int, Request]


class Deadlines:
    """Pending time limits. Entries of requests that ended are dropped when they come up, or when they are many."""

    def __init__(self) -> None:
        self._heap: list[_Entry] = []
        self._count = 0

    def add_waiting(self, request: Request, deadline: float) -> None:
        """The request has to run for the first time before ``deadline`` (seconds)."""
        self._add(request, deadline, _WAITING_ONLY)

    def add_total(self, request: Request, deadline: float) -> None:
        """The request has to end before ``deadline`` (seconds)."""
        self._add(request, deadline, _ALWAYS)

    def next(self) -> float | None:
        """The next deadline that still concerns someone."""
        while self._heap and not _applies(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def expired(self, now: float) -> list[tuple[Request, FinishCode]]:
        """Requests whose limit is over at ``now``, each once."""
        found: dict[int, tuple[Request, FinishCode]] = {}
        while self._heap and self._heap[0][0] <= now:
            entry = heapq.heappop(self._heap)
            if _applies(entry):
                request = entry[3]
                never_ran = request.state in (RequestState.NEW, RequestState.HELD)
                code = FinishCode.WAITING_TIMEOUT if never_ran else FinishCode.RUNNING_TIMEOUT
                found.setdefault(request.order, (request, code))
        return list(found.values())

    def prune(self, num_live: int) -> None:
        """Drop entries without effect when they outnumber the live ones (at most two per request)."""
        if len(self._heap) > 4 * num_live + 256:
            self._heap = [entry for entry in self._heap if _applies(entry)]
            heapq.heapify(self._heap)

    def _add(self, request: Request, deadline: float, kind: int) -> None:
        # The running number makes ties comparable without comparing requests.
        self._count += 1
        heapq.heappush(self._heap, (deadline, self._count, kind, request))


def _applies(entry: _Entry) -> bool:
    state = entry[3].state
    if entry[2] == _WAITING_ONLY:
        return state in (RequestState.NEW, RequestState.HELD)
    return state not in (RequestState.FINISHED, RequestState.ABORTED)
