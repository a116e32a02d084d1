"""How many requests run at once and start in a second, who waits for that, and whose turn it is.

Between tenants it is the virtual token counter of the engine's fair scheduling: the one that was served least, for its
weight, goes first. The length of a request stands for its prompt's tokens, the events of a stream for its output's.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from sglang_lite.router.errors import RouterError
from sglang_lite.router.option_groups import LimitOptions
from sglang_lite.scheduler.fairness import TenantCounters
from sglang_lite.server.tenants import Tenant
from sglang_lite.types import StartupError

BYTES_PER_TOKEN = 4
"""Of prompts, about."""

_BUSY = {"retry-after": "1"}


class Ticket:
    """The right of one request to run."""

    __slots__ = ("_counters", "slot")

    def __init__(self, counters: TenantCounters, slot: int) -> None:
        self._counters = counters
        self.slot = slot

    def charge(self, tokens: int) -> None:
        """The request drew so many tokens."""
        self._counters.charge(self.slot, tokens)


class _Waiter:
    __slots__ = ("cost", "slot", "turn")

    def __init__(self, slot: int, cost: int, turn: asyncio.Future[None]) -> None:
        self.slot = slot
        self.cost = cost
        self.turn = turn


class Admission:
    """The limits of one router process, and its queue.

    Args:
        options: with the limits.

    Raises:
        StartupError: a limit that nothing would ever pass.
    """

    def __init__(self, options: LimitOptions, clock: Callable[[], float] = time.monotonic) -> None:
        if options.max_concurrent_requests == 0:
            raise StartupError("--max-concurrent-requests 0: must be at least 1, or -1 for no limit")
        self._most = options.max_concurrent_requests
        self._rate = options.rate_limit_tokens_per_second
        self._room = options.queue_size
        self._seconds = options.queue_timeout_secs
        self._clock = clock
        self._counters = TenantCounters()
        self._queues: dict[int, deque[_Waiter]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._allowance = float(self._rate or 0)
        self._counted = clock()
        self.running = 0
        self.waiting = 0

    @property
    def is_limited(self) -> bool:
        """Whether there is any limit."""
        return self._most > 0 or self._rate is not None

    @asynccontextmanager
    async def enter(self, tenant: Tenant, cost: int) -> AsyncIterator[Ticket]:
        """Wait for the turn of a request whose prompt has about ``cost`` tokens; it has a place until the end.

        Raises:
            RouterError: too_many_requests when the queue is full, or is made room in for others; queue_timeout.
        """
        slot = await self._enter(tenant, cost)
        try:
            yield Ticket(self._counters, slot)
        finally:
            self._counters.stop(slot)
            self.running -= 1
            self._dispatch()

    async def _enter(self, tenant: Tenant, cost: int) -> int:
        slot = self._counters.slot(tenant.name, tenant.weight)
        if not self.waiting and self._may_start():
            self._counters.arrive(slot)
            self._start(slot, cost)
            return slot
        if self.waiting >= self._room and not self._make_room(slot):
            message = f"{self.waiting} requests wait already, the most that may (--queue-size); try again later."
            raise RouterError("too_many_requests", message, _BUSY)
        waiter = _Waiter(slot, cost, asyncio.get_running_loop().create_future())
        self._counters.arrive(slot)
        self._queues.setdefault(slot, deque()).append(waiter)
        self.waiting += 1
        self._dispatch()  # the bucket may have filled; else its timer is set
        try:
            async with asyncio.timeout(self._seconds):
                await waiter.turn
        except BaseException as error:
            if waiter.turn.done() and not waiter.turn.cancelled() and waiter.turn.exception() is None:
                # Its turn came in the same moment: the place goes to the next one.
                self._counters.stop(slot)
                self.running -= 1
                self._dispatch()
            elif waiter in self._queues.get(slot, ()):
                self._leave(waiter)
            if isinstance(error, TimeoutError):
                message = (
                    f"The request waited {self._seconds:g} s for its turn (--queue-timeout-secs); try again later."
                )
                raise RouterError("queue_timeout", message, _BUSY) from None
            raise
        return slot

    def _may_start(self) -> bool:
        if 0 < self._most <= self.running:
            return False
        if self._rate is None:
            return True
        now = self._clock()
        self._allowance = min(float(self._rate), self._allowance + (now - self._counted) * self._rate)
        self._counted = now
        return self._allowance >= 1

    def _start(self, slot: int, cost: int) -> None:
        """A request that has arrived runs."""
        self._counters.leave(slot)
        self._counters.start(slot, cost)
        self.running += 1
        if self._rate is not None:
            self._allowance -= 1

    def _dispatch(self) -> None:
        """Let those run who may, and look again when the bucket will have filled."""
        while self.waiting and self._may_start():
            waiter = self._queues[self._counters.least_served()][0]
            if waiter.turn.done():  # its client left in this very moment, and it has not run since
                self._leave(waiter)
                continue
            self._pop(waiter)
            self._start(waiter.slot, waiter.cost)
            waiter.turn.set_result(None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.waiting and self._rate is not None and self._allowance < 1:
            pause = (1 - self._allowance) / self._rate
            self._timer = asyncio.get_running_loop().call_later(pause, self._dispatch)

    def _make_room(self, slot: int) -> bool:
        """Send away the newest request of a tenant that fills the queue beyond its share, for one that does not."""
        if not self._room or not self._counters.crowds_out(slot):
            return False
        newest = self._queues[self._counters.heaviest()][-1]
        self._leave(newest)
        message = (
            "The queue is full, mostly with requests of yours, and other tenants have their turn; try again later."
        )
        if not newest.turn.done():  # or its client left in this very moment
            newest.turn.set_exception(RouterError("too_many_requests", message, _BUSY))
        return True

    def _leave(self, waiter: _Waiter) -> None:
        self._pop(waiter)
        self._counters.leave(waiter.slot)

    def _pop(self, waiter: _Waiter) -> None:
        queue = self._queues[waiter.slot]
        if queue[0] is waiter:
            queue.popleft()
        else:
            queue.remove(waiter)
        if not queue:
            del self._queues[waiter.slot]
        self.waiting -= 1
