"""The aiohttp application of the router."""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import aiohttp
from aiohttp import web

from sglang_lite.router import control, worker_routes
from sglang_lite.router.context import CONTEXT, RouterContext
from sglang_lite.router.errors import RouterError, error_response
from sglang_lite.router.prefill_decode import forward_pair
from sglang_lite.router.proxy import REQUEST_ID, end_stream, forward, request_id_of

logger = logging.getLogger(__name__)

PROXIED = (
    "/generate",
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/embeddings",
    "/encode",
    "/v1/classify",
    "/v1/score",
    "/v1/rerank",
    "/rerank",
)
PLAIN = ("/tokenize", "/detokenize", "/v1/tokenize", "/v1/detokenize")
"""Work that any worker does, in a pair too."""
_OPEN = frozenset({"/health", "/healthz", "/liveness", "/readyz", "/readiness", "/metrics"})
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def make_app(context: RouterContext) -> web.Application:
    """The application; its session and its watch over workers live from start-up to clean-up."""
    app = web.Application(middlewares=[_middleware], client_max_size=context.options.max_payload_size)
    app[CONTEXT] = context
    app.cleanup_ctx.append(_running)
    handler = forward_pair if context.options.is_paired else forward
    for path in PROXIED:
        app.router.add_post(path, handler)
    for path in PLAIN:
        app.router.add_post(path, control.ask_one)
    for path in control.FANS:
        app.router.add_post(path, control.fan_out)
    app.router.add_get("/flush_cache", control.fan_out)
    for path in control.ONE:
        app.router.add_route("*", path, control.ask_one)
    for path in ("/get_model_info", "/model_info"):
        app.router.add_get(path, control.ask_one)
    app.router.add_route("*", "/poll_transfers", control.poll_transfers)
    app.router.add_get("/v1/loads", control.loads)
    for path in ("/health", "/healthz", "/liveness"):
        app.router.add_get(path, worker_routes.alive)
    for path in ("/readyz", "/readiness"):
        app.router.add_get(path, worker_routes.ready)
    app.router.add_get("/v1/models", worker_routes.models)
    app.router.add_get("/metrics", worker_routes.metrics)
    app.router.add_get("/workers", worker_routes.list_workers)
    app.router.add_post("/workers", worker_routes.add_worker)
    app.router.add_get("/workers/{worker_id}", worker_routes.show_worker)
    app.router.add_delete("/workers/{worker_id}", worker_routes.remove_worker)
    return app


async def _running(app: web.Application) -> AsyncIterator[None]:
    context = app[CONTEXT]
    # Answers pass through as they are: nothing is unpacked, no cookie is kept, no connection is waited for.
    context.session = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=30),
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None),
        skip_auto_headers=("User-Agent", "Accept-Encoding"),
    )
    worker_routes.start_watching(context)
    sweeping = asyncio.create_task(_expire_leases(context))
    yield
    tasks = [sweeping, *context.tasks.values()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await context.session.close()


async def _expire_leases(context: RouterContext) -> None:
    """End requests whose lease has run out."""
    pause = min(1.0, context.options.stale_request_timeout_secs / 4)
    loop = asyncio.get_running_loop()
    while True:
        await asyncio.sleep(pause)
        for lease in context.leases.expire(context.now):
            scope = context.scopes.pop(lease, None)
            if scope is not None:
                scope.reschedule(loop.time())


@web.middleware
async def _middleware(request: web.Request, handler: _Handler) -> web.StreamResponse:
    context = request.app[CONTEXT]
    started = time.monotonic()
    request["request_id"] = request_id_of(request, context.options.request_id_headers)
    try:
        _authorize(request, context)
        response = await handler(request)
    except RouterError as error:
        response = await _failed(request, error)
    except web.HTTPException:
        raise
    except Exception:  # a fault of ours: the client gets the envelope, the operator the traceback
        logger.exception("fault while serving %s", request.path)
        response = await _failed(request, RouterError("internal_error", "The router failed; its log says more."))
    if context.draining and not response.prepared:
        response.force_close()  # the next request on this connection would find nobody
    route = request.match_info.route.resource
    path = route.canonical if route is not None else "other"
    context.metrics.requests.labels(path, response.status).inc()
    context.metrics.duration.labels(path).observe(time.monotonic() - started)
    return response


async def _failed(request: web.Request, error: RouterError) -> web.StreamResponse:
    """The error as an answer, or at the end of the one that has begun."""
    stream = request.get("stream")
    if isinstance(stream, web.StreamResponse):
        return await end_stream(stream, error)
    response = error_response(error)
    response.headers[REQUEST_ID] = request["request_id"]
    return response


def _authorize(request: web.Request, context: RouterContext) -> None:
    key = context.options.api_key
    if key is None or request.path in _OPEN:
        return
    given = request.headers.get("authorization", "")
    if not hmac.compare_digest(given.encode(), f"Bearer {key}".encode()):
        raise RouterError("unauthorized", "A valid API key is needed: Authorization: Bearer KEY.")
