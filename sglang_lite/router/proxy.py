"""Requests to one worker: choose, send, try another one before the first byte, or a second one beside it."""

from __future__ import annotations

import asyncio

from aiohttp import web

from sglang_lite.router.call import Call, read_call
from sglang_lite.router.data_parallel import spread, with_rank
from sglang_lite.router.errors import NO_ATTEMPT, RouterError
from sglang_lite.router.exchange import BROKEN, RETRIED, Reply, exchange, has_begun, whole
from sglang_lite.router.hedged import Outcome, hedger_of
from sglang_lite.router.lease import Lease
from sglang_lite.router.migration import movement
from sglang_lite.router.race import Leg
from sglang_lite.router.workers import Worker, usable


async def forward(request: web.Request) -> web.StreamResponse:
    """Pass a request to one worker of its model."""
    call = await read_call(request)
    if call.context.options.migrate_streams:
        call.movement = movement(request.path, call.head)
    return await Attempts(call).run()


class Attempts:
    """The attempts of one call. A worker is tried again only when no other one is left."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._tried: set[str] = set()
        self._reply: Reply | None = None
        self._error: RouterError | None = None
        self._hedger = hedger_of(call, self._exchange, self._workers, self._tried)

    async def run(self) -> web.StreamResponse:
        """The answer of the first worker that has one, or of the last."""
        call, options = self._call, self._call.context.options
        attempts = 1 if options.disable_retries else options.retry_max_retries
        for attempt in range(attempts):
            try:
                worker = self._choose()
            except RouterError as error:
                if attempt == 0:
                    raise
                self._error = self._error or error
                break
            if attempt:
                call.context.metrics.retries.inc()
                if worker.name in self._tried:
                    await asyncio.sleep(options.backoff(attempt, call.context.generator.random()))
            self._tried.add(worker.name)
            response = await self._send(worker)
            if response is not None:
                return response
        if self._reply is not None:
            return whole(self._reply, call.request_id)
        raise self._error or RouterError("internal_error", NO_ATTEMPT)

    def _choose(self) -> Worker:
        call = self._call
        ready = usable(self._workers(), call.context.now, "no_healthy_workers")
        fresh = [worker for worker in ready if worker.name not in self._tried] or ready
        return call.context.choose("regular", fresh, call.prompt)

    def _workers(self) -> list[Worker]:
        """Those of the model.

        Raises:
            RouterError: there are none, or none with the rank that the caller asks for.
        """
        workers = self._call.context.registry.of_model(self._call.head.model_name)
        return spread(self._call, [worker for worker in workers if worker.role == "regular"])

    async def _send(self, worker: Worker) -> web.StreamResponse | None:
        """One attempt; None when another one may follow."""
        call, moving = self._call, self._call.movement
        body = call.body if moving is None else moving.body(call.body, call.head)
        # Noted before the answer, so that requests with the same beginning follow it while the first is computed.
        call.context.policies["regular"].sent(worker, call.prompt)
        try:
            if self._hedger is None or has_begun(moving):
                response, reply = await self._exchange(worker, body)
            else:
                response, reply = await self._hedger.attempt(worker, body)
        except RouterError as error:
            if error.code == "stale_request_expired":
                raise
            self._error, self._reply = error, None
            if error.code == "upstream_timeout" and not has_begun(moving):
                raise
            return None
        if response is not None:
            return response
        assert reply is not None
        if has_begun(moving):  # not what a stream that has begun can end with
            self._error = RouterError("upstream_unreachable", BROKEN)
            return None
        if reply.status in RETRIED:
            self._reply = reply
            return None
        return whole(reply, call.request_id)

    async def _exchange(self, worker: Worker, body: bytes, leg: Leg | None = None) -> Outcome:
        call = self._call
        async with Lease(call.context, worker) as lease:
            return await exchange(call, worker, with_rank(call, worker, body), lease, moving=call.movement, leg=leg)
