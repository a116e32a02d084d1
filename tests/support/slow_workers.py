"""Workers that answer when a test lets them, behind a router that hedges when the test says so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from aiohttp import web

from tests.support.null_workers import NullWorker, RouterUnderTest, router_over
from tests.support.races import NEVER, Races, check_idle, soon

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
CHAT_PATH = "/v1/chat/completions"
STREAM = {**CHAT, "stream": True}


class Slow(NullWorker):
    """Answers as it is told.

    Attributes:
        open: each permit lets a request go on one step: its first byte, then its end.
        fails: the status that it answers with.
        left: requests whose caller went away.
    """

    def __init__(self, name: str, *, early: bool = False, **info: Any) -> None:
        super().__init__(**info)
        self.name = name
        self.open = asyncio.Semaphore(0)
        self.fails = 0
        self.early = early
        self.running = self.left = 0
        self.answer = self._steps

    def allow(self, steps: int = 2) -> None:
        for _ in range(steps):
            self.open.release()

    async def _steps(self, request: web.Request, data: bytes) -> web.StreamResponse:
        self.running += 1
        try:
            streamed = msgspec.json.decode(data).get("stream") is True
            response = web.StreamResponse(headers={"content-type": "text/event-stream"})
            if streamed and self.early:
                await response.prepare(request)
            await self.open.acquire()
            if self.fails:
                return web.json_response({"error": self.name}, status=self.fails)
            if not streamed:
                await self.open.acquire()
                return web.json_response({"worker": self.name})
            if not response.prepared:
                await response.prepare(request)
            await response.write(b"data: %b\n\n" % self.name.encode())
            await self.open.acquire()
            await response.write(b"data: end\n\ndata: [DONE]\n\n")
            return response
        except asyncio.CancelledError:
            self.left += 1
            raise
        finally:
            self.running -= 1


class Scene:
    """Workers of which the first has the request, and a client that waits for it."""

    def __init__(self, router: RouterUnderTest, races: Races) -> None:
        self.router = router
        self.races = races

    async def send(self, worker: Slow, body: Any = CHAT, path: str = CHAT_PATH, **options: Any) -> asyncio.Task[Any]:
        """A request that ``worker`` has."""
        before = len(worker.seen)
        task = asyncio.create_task(self.router.post(path, body, **options))
        await soon(lambda: len(worker.seen) > before or task.done())
        assert not task.done(), task.result()
        return task

    async def hedge(self, worker: Slow) -> None:
        """The hedge is due, and ``worker`` has it."""
        before = len(worker.seen)
        self.races.fire()
        await soon(lambda: len(worker.seen) > before)


@asynccontextmanager
async def scene(*workers: Slow, races: Races, **options: Any) -> AsyncIterator[Scene]:
    settings = {"policy": "round_robin", "hedge_after_secs": NEVER, "hedge_max_percent": 100.0}
    async with router_over(*workers, **{**settings, "request_timeout_secs": 2 * NEVER, **options}) as router:
        yield Scene(router, races)
        await check_idle(router)
        await soon(lambda: not any(worker.running for worker in workers))
