"""The router over real servers: in this process, or as the program that users start."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from aiohttp.test_utils import TestServer

from sglang_lite.router.app import make_app
from sglang_lite.router.context import RouterContext
from sglang_lite.router.options import RouterOptions, checked
from tests.support.null_workers import RouterUnderTest


@asynccontextmanager
async def router_for(urls: Sequence[str], **options: Any) -> AsyncIterator[RouterUnderTest]:
    """A router in this process over servers that are ready; all have registered."""
    context = RouterContext(checked(RouterOptions(worker_urls=tuple(urls), retry_initial_backoff_ms=1.0, **options)))
    server = TestServer(make_app(context))
    await server.start_server()
    try:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            router = RouterUnderTest(context, server, session)
            await router.registered(len(urls))
            yield router
    finally:
        await server.close()
