"""The servers that ``benchmarks.front`` measures, each in a process of its own, none of them with a model.

``ours`` is the whole front over an engine core with a null executor. ``plain`` is what one writes by hand with aiohttp:
``json.loads``, a dictionary for every chunk, ``json.dumps``, and one clock that wakes all streams of a step.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import uvloop
from aiohttp import web

from sglang_lite.config import ServerConfig
from sglang_lite.engine.async_engine import AsyncEngine
from sglang_lite.server.app import make_app
from sglang_lite.server.context import ServerContext
from sglang_lite.server.run import warm_up
from tests.support.chain_model import build_chain_model

STREAMS = 1024
"""Most running requests."""


class Ticker:
    """Wakes everybody who waits, once a step."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._tick = asyncio.Event()

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._seconds)
            tick, self._tick = self._tick, asyncio.Event()
            tick.set()

    async def wait(self) -> None:
        if self._seconds:
            await self._tick.wait()
        else:
            await asyncio.sleep(0)


def _chunk(kind: str, text: str, finish_reason: str | None) -> dict[str, Any]:
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason, "matched_stop": None}
    return {
        "id": f"cmpl-{time.time_ns():x}-00000001",
        "object": kind,
        "created": int(time.time()),
        "model": "chain",
        "choices": [choice],
        "usage": None,
    }


def plain_app(step_seconds: float) -> web.Application:
    """The hand-written server."""
    ticker = Ticker(step_seconds)

    async def complete(request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        tokens = body["max_tokens"]
        if not body.get("stream"):
            reply = _chunk("text_completion", "A" * tokens, "length")
            return web.Response(text=json.dumps(reply), content_type="application/json")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for number in range(tokens):
            await ticker.wait()
            event = _chunk("text_completion", "ABCD"[number % 4], "length" if number == tokens - 1 else None)
            await response.write(f"data: {json.dumps(event)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    async def start(app: web.Application) -> None:
        if step_seconds:
            app[_TICKING] = asyncio.create_task(ticker.run())

    app = web.Application()
    app.on_startup.append(start)
    app.router.add_post("/v1/completions", complete)
    return app


_TICKING: web.AppKey[asyncio.Task[None]] = web.AppKey("ticking", asyncio.Task)


async def _listen(app: web.Application, stop: asyncio.Event) -> None:
    """Serve on a free port, which is written to standard output, until ``stop``."""
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.2)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
        print(runner.addresses[0][1], flush=True)
        await stop.wait()
    finally:
        await runner.cleanup()


async def _serve(kind: str, milliseconds: str) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    if kind == "plain":
        await _listen(plain_app(float(milliseconds) / 1000), stop)
        return
    with tempfile.TemporaryDirectory() as folder:
        config = ServerConfig(
            model_path=str(build_chain_model(Path(folder))),
            device="cpu",
            served_model_name="chain",
            max_total_tokens=1024 * STREAMS,
            max_running_requests=STREAMS,
            disable_radix_cache=True,
        )
        command = (sys.executable, "-m", "tests.unit.engine.null_core", milliseconds)
        async with await AsyncEngine.start(config, command=command) as engine:
            context = ServerContext(engine)
            await warm_up(context)
            await _listen(make_app(context), stop)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(sys.argv[1], sys.argv[2]))
