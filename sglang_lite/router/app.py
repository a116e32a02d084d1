"""The aiohttp application of the router."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import aiohttp
from aiohttp import web

from sglang_lite.router import control, plain, sibling_workers, worker_routes
from sglang_lite.router.context import CONTEXT, RouterContext
from sglang_lite.router.discovery import discover
from sglang_lite.router.envelope import envelope
from sglang_lite.router.kubernetes_api import ClusterAccess
from sglang_lite.router.limited import limited
from sglang_lite.router.prefill_decode import forward_pair
from sglang_lite.router.proxy import forward
from sglang_lite.router.routes import PLAIN, PROXIED
from sglang_lite.server.protocol_log import shorten_protocol_errors


def make_app(context: RouterContext) -> web.Application:
    """The application; its session and its watch over workers live from start-up to clean-up."""
    shorten_protocol_errors()
    app = web.Application(middlewares=[envelope], client_max_size=context.options.max_payload_size)
    app[CONTEXT] = context
    app.cleanup_ctx.append(_running)
    app.on_response_prepare.append(context.cross_origin.on_prepare)
    handler = forward_pair if context.options.is_paired else forward
    for path in PROXIED:
        app.router.add_post(path, limited(handler))
    for path in PLAIN:
        app.router.add_post(path, plain.pass_on)
    app.router.add_post("/v1/tokenize", plain.tokenize)
    app.router.add_post("/v1/detokenize", plain.detokenize)
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
    app.router.add_get(sibling_workers.KNOWN, sibling_workers.known_workers)
    app.router.add_post("/workers", worker_routes.add_worker)
    app.router.add_get("/workers/{worker_id}", worker_routes.show_worker)
    app.router.add_delete("/workers/{worker_id}", worker_routes.remove_worker)
    return app


async def _running(app: web.Application) -> AsyncIterator[None]:
    context = app[CONTEXT]
    access = ClusterAccess.in_cluster() if context.options.service_discovery else None
    # Answers pass through as they are: nothing is unpacked, no cookie is kept, no connection is waited for.
    context.session = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=30, ssl=context.trust.context()),
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None),
        skip_auto_headers=("User-Agent", "Accept-Encoding"),
    )
    await sibling_workers.take_over_workers(context)
    worker_routes.start_watching(context)
    running = [asyncio.create_task(_expire_leases(context))]
    if context.siblings is not None and context.siblings.number:
        running.append(asyncio.create_task(sibling_workers.keep_up(context, context.siblings)))
    if access is not None:
        running.append(asyncio.create_task(discover(context, access)))
    yield
    tasks = [*running, *context.tasks.values()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await context.close()


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
