"""Liveness and readiness: 503 until warmed up, 200 only while the engine answers."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

from aiohttp import web

from sglang_lite.disaggregation.base import FAKE_HOST
from sglang_lite.frontend.request import GenerateRequest
from sglang_lite.server.context import Phase, ServerContext, context_of
from sglang_lite.types import RequestError, SamplingParams, TransferParams

_PROBE_TIMEOUT = 20.0
_ONE_GREEDY_TOKEN = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True)


def is_serving(context: ServerContext) -> bool:
    """Whether the server is ready and its engine answers."""
    return context.phase is Phase.READY and context.engine.is_alive and context.is_responsive


def _empty(healthy: bool) -> web.Response:
    return web.Response(status=200 if healthy else 503)


async def probe(context: ServerContext) -> bool:
    """Whether the engine generates: a hidden request of one greedy token on token 0."""
    request = GenerateRequest(
        request_id=context.new_request_id("HEALTH_CHECK_"), input_ids=[0], sampling=_ONE_GREEDY_TOKEN
    )
    if context.config.is_disaggregated:
        # A pair of its own that needs no other server.
        request.transfer = TransferParams(FAKE_HOST, 0, 0, rid=request.request_id)
    try:
        async with asyncio.timeout(_PROBE_TIMEOUT), aclosing(context.engine.generate(request)) as outputs:
            async for output in outputs:
                reason = output.finish_reason
                return reason is None or reason.type != "abort"
    except (RequestError, TimeoutError):
        return False
    return False


async def health(request: web.Request) -> web.Response:
    """Cheap: the core process lives and its loop has answered lately."""
    return _empty(is_serving(context_of(request)))


async def health_generate(request: web.Request) -> web.Response:
    """Generates one token, unless the engine is busy or paused."""
    context = context_of(request)
    if not is_serving(context):
        return _empty(False)
    if context.requests_in_flight:
        return _empty(True)  # the heartbeat says that it moves; a question would wait for the step at hand
    try:
        async with asyncio.timeout(_PROBE_TIMEOUT):
            load = await context.engine.loads()
    except (RequestError, TimeoutError):
        return _empty(False)
    if load.num_running or load.num_waiting or load.paused:
        return _empty(True)
    return _empty(await probe(context))


async def ready(request: web.Request) -> web.Response:
    """Like health, but a paused server is not ready for more requests."""
    context = context_of(request)
    return _empty(is_serving(context) and not context.paused)


def add_health_routes(app: web.Application) -> None:
    """Register the routes of this module."""
    app.router.add_get("/health", health)
    app.router.add_get("/health_generate", health_generate)
    app.router.add_get("/ready", ready)
    app.router.add_get("/ping", health)
