"""Attempts of one call that may go to a second worker."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from aiohttp import web

from sglang_lite.router.balance import least_loaded
from sglang_lite.router.breaker import BreakerState
from sglang_lite.router.call import Call
from sglang_lite.router.errors import RouterError
from sglang_lite.router.exchange import Reply
from sglang_lite.router.hedging import Hedging, may_be_hedged
from sglang_lite.router.race import Leg, Race, Send
from sglang_lite.router.workers import Worker

Outcome = tuple[web.StreamResponse | None, Reply | None]
Exchange = Callable[[Worker, bytes, Leg | None], Coroutine[Any, Any, Outcome]]


class Hedger:
    """Sends a call to a second worker when nothing comes from the first for too long, once at most.

    The hedge goes to the least loaded worker that is well, and past the policy: a key stays where it is, and the prompt
    is noted as sent to it when it wins.

    Args:
        exchange: one exchange of the call with a worker, under its lease.
        workers: those that may serve the call; RouterError for none.
        tried: names of workers that have had the call, added to.
    """

    def __init__(
        self, call: Call, hedging: Hedging, exchange: Exchange, workers: Callable[[], list[Worker]], tried: set[str]
    ) -> None:
        self._call = call
        self._hedging = hedging
        self._exchange = exchange
        self._workers = workers
        self._tried = tried
        self._kind = (call.request.path, call.head.stream is True)
        self._second: Worker | None = None
        hedging.arrive()

    async def attempt(self, worker: Worker, body: bytes) -> Outcome:
        """One attempt that begins at ``worker``.

        Raises:
            RouterError: as ``exchange.exchange`` does.
        """
        context = self._call.context
        started = context.now

        def began(is_hedge: bool) -> None:
            self._hedging.note(self._kind, context.now - started)
            if is_hedge and self._second is not None:
                context.policies["regular"].sent(self._second, self._call.prompt)

        race = Race[Outcome](
            lambda leg: self._exchange(worker, body, leg),
            lambda: self._hedge(worker, body),
            context.options.request_timeout_secs,
            began,
        )
        try:
            return await race.run(self._hedging.delay(self._kind))
        finally:
            if race.result is not None:
                context.metrics.hedges.labels(race.result).inc()

    def _hedge(self, first: Worker, body: bytes) -> Send[Outcome] | None:
        """The exchange with another worker, where there is one and not too many requests were hedged lately."""
        if self._second is not None:
            return None
        skipped = self._call.context.metrics.unhedged
        worker = self._choose(first)
        if worker is None:
            skipped.labels("no_worker").inc()
            return None
        if not self._hedging.take():
            skipped.labels("budget").inc()
            return None
        self._second = worker
        self._tried.add(worker.name)
        return lambda leg: self._exchange(worker, body, leg)

    def _choose(self, first: Worker) -> Worker | None:
        """A worker at another address (a request is at a server once), that was not tried and does not need a probe."""
        try:
            workers = self._workers()
        except RouterError:
            return None
        well = [worker for worker in workers if worker.healthy and worker.breaker.state is BreakerState.CLOSED]
        others = [worker for worker in well if worker.url != first.url and worker.name not in self._tried]
        return least_loaded(others, self._call.context.generator.randrange(len(others))) if others else None


def hedger_of(call: Call, exchange: Exchange, workers: Callable[[], list[Worker]], tried: set[str]) -> Hedger | None:
    """For a call that may be hedged; None for any other, and where hedging is off."""
    hedging = call.context.hedging
    if hedging is None or not may_be_hedged(call.request.path, call.head):
        return None
    return Hedger(call, hedging, exchange, workers, tried)
