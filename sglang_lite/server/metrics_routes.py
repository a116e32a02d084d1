"""``GET /metrics``."""

from __future__ import annotations

import asyncio
import time

from aiohttp import web

from sglang_lite.observability.engine import EngineCollector
from sglang_lite.observability.metrics import CONTENT_TYPE, ServerMetrics
from sglang_lite.server.context import ServerContext, context_of
from sglang_lite.types import RequestError

_LOADS_TIMEOUT = 2.0


def engine_collector(context: ServerContext, metrics: ServerMetrics) -> EngineCollector:
    """The collector of the context's engine."""
    info = context.engine.info
    return EngineCollector(
        metrics.labels,
        context_length=info.context_length,
        weight_bytes=info.weight_bytes,
        kv_cache_bytes=info.num_pages * info.kv_cache.page_size_bytes,
        startup_seconds={**info.startup_seconds, **context.startup_seconds},
        num_replicas=context.config.dp_size,
    )


def add_metrics_routes(app: web.Application, metrics: ServerMetrics, collector: EngineCollector) -> None:
    """Register the route of this module."""

    async def scrape(request: web.Request) -> web.Response:
        context, started_at = context_of(request), time.perf_counter()
        adapters = context.engine.adapters
        collector.adapter_slots = (adapters.num_used, adapters.num_slots) if adapters.num_slots else None
        try:
            async with asyncio.timeout(_LOADS_TIMEOUT):
                collector.snapshots = await context.engine.replica_loads()
            metrics.loads_duration.observe(time.perf_counter() - started_at)
        except TimeoutError:
            # A long step: its last report is a second older than that.
            if context.config.dp_size == 1:
                collector.snapshots = [(0, context.engine.stats)]
        except RequestError:
            collector.snapshots = ()  # better no series than old ones that look alive
        return web.Response(body=metrics.render(), headers={"Content-Type": CONTENT_TYPE})

    app.router.add_get("/metrics", scrape)
    app.router.add_get("/metrics/{rest:.*}", scrape)
