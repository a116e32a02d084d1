"""What a worker has of a request while it is there: a place in its load, and a word for its breaker at the end."""

from __future__ import annotations

import asyncio

from sglang_lite.router.breaker import BreakerState
from sglang_lite.router.context import RouterContext
from sglang_lite.router.errors import ALL_REST, RouterError
from sglang_lite.router.workers import Worker


class Lease:
    """A worker's load and breaker while a request is there; says how it ended exactly once, whatever happens.

    Attributes:
        is_probe: the breaker is half open, and learns from this request whether the worker is well.

    Raises:
        RouterError: stale_request_expired when the lease ran out, breaker_open when another request has the probe.
    """

    def __init__(self, context: RouterContext, worker: Worker) -> None:
        self._context = context
        self._worker = worker
        self._lease = -1
        self._verdict: bool | None = None
        self.is_probe = False
        self._scope = asyncio.timeout(None)

    async def __aenter__(self) -> Lease:
        if not self._worker.breaker.acquire(self._context.now):
            raise RouterError("breaker_open", ALL_REST)
        self.is_probe = self._worker.breaker.state is not BreakerState.CLOSED
        await self._scope.__aenter__()
        self._lease = self._context.leases.acquire(self._worker.index, self._context.now)
        self._context.scopes[self._lease] = self._scope
        self._worker.count(1)
        return self

    def judge(self, well: bool) -> None:
        """How the worker did; without a word the breaker learns nothing."""
        self._verdict = well

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        context, breaker = self._context, self._worker.breaker
        self._worker.count(-1)
        context.scopes.pop(self._lease, None)
        context.leases.release(self._lease)
        try:
            await self._scope.__aexit__(None if error is None else type(error), error, None)
        except TimeoutError:
            self._verdict = False
            context.metrics.stale.inc()
            seconds = context.options.stale_request_timeout_secs
            message = f"The request took more than {seconds:g} s (--stale-request-timeout-secs); ask for less at once."
            raise RouterError("stale_request_expired", message) from None
        finally:
            if self._verdict is None:
                breaker.forget(self.is_probe)
            elif self._verdict:
                breaker.succeed(self.is_probe)
            else:
                breaker.fail(context.now, self.is_probe)
