"""Workers without a model, and a router in front of them, in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp
import msgspec
from aiohttp import web
from aiohttp.test_utils import TestServer

from sglang_lite.router.app import make_app
from sglang_lite.router.context import RouterContext
from sglang_lite.router.options import RouterOptions, checked

LAYOUT = {"dtype": "float32", "page_size": 16, "num_layers": 1, "kv_heads": 1, "head_dim": 2, "kv_tensors_per_token": 2}
Answer = Callable[[web.Request, bytes], Awaitable[web.StreamResponse]]


class NullWorker:
    """Records what it gets; answers what ``answer`` says, or that it was there.

    Attributes:
        seen: (path, headers, body) of every request but those of registration and health.
    """

    def __init__(self, **info: Any) -> None:
        self.info = {"served_model_name": "m", "disaggregation_mode": "null", "kv_cache": LAYOUT, **info}
        self.seen: list[tuple[str, dict[str, str], bytes]] = []
        self.answer: Answer | None = None
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self.server = TestServer(app)

    @property
    def url(self) -> str:
        return str(self.server.make_url("/")).rstrip("/")

    def count(self, path: str) -> int:
        return sum(seen[0] == path for seen in self.seen)

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        if request.path == "/server_info":
            return web.json_response(self.info)
        if request.path == "/health":
            return web.Response()
        self.seen.append((request.path, {name.lower(): value for name, value in request.headers.items()}, body))
        if self.answer is not None:
            return await self.answer(request, body)
        if request.path == "/v1/loads":
            return web.json_response({"aggregate": {"total_tokens": 7}})
        return web.json_response({"success": True, "message": "", "worker": self.url})


class RouterUnderTest:
    """A running router and a client for it."""

    def __init__(self, context: RouterContext, server: TestServer, session: aiohttp.ClientSession) -> None:
        self.context = context
        self.url = str(server.make_url("/")).rstrip("/")
        self.session = session

    async def post(self, path: str, body: Any, **options: Any) -> tuple[int, Any, bytes]:
        data = body if isinstance(body, bytes) else msgspec.json.encode(body)
        async with self.session.post(self.url + path, data=data, **options) as response:
            return response.status, response.headers, await response.read()

    async def get(self, path: str) -> tuple[int, Any, bytes]:
        async with self.session.get(self.url + path) as response:
            return response.status, response.headers, await response.read()

    async def registered(self, count: int) -> None:
        """Wait until ``count`` workers have introduced themselves."""
        async with asyncio.timeout(20):
            while len(self.context.registry.registered()) < count:
                await asyncio.sleep(0.005)


@asynccontextmanager
async def router_over(
    *workers: NullWorker, urls: tuple[str, ...] = (), **options: Any
) -> AsyncIterator[RouterUnderTest]:
    """A router over workers, which are started first; prefill and decode ones go by what they say they are.

    ``urls`` are those of workers that run already.
    """
    async with AsyncExitStack() as stack:
        for worker in workers:
            await worker.server.start_server()
            stack.push_async_callback(worker.server.close)
        modes = {worker.url: worker.info["disaggregation_mode"] for worker in workers}
        if "decode" in modes.values() or "prefill" in modes.values():
            options["prefill"] = tuple((url, None) for url, mode in modes.items() if mode == "prefill")
            options["decode"] = tuple(url for url, mode in modes.items() if mode == "decode")
        else:
            options["worker_urls"] = (*modes, *urls)
        context = RouterContext(checked(RouterOptions(**{"retry_initial_backoff_ms": 1.0, **options})))
        server = TestServer(make_app(context))
        await server.start_server()
        stack.push_async_callback(server.close)
        session = await stack.enter_async_context(aiohttp.ClientSession())
        router = RouterUnderTest(context, server, session)
        await router.registered(len(workers) + len(urls))
        yield router
