"""Hedging in front of our own server: it forgets the request of the call that lost."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from aiohttp.test_utils import TestServer

from sglang_lite.server.app import make_app
from sglang_lite.server.context import Phase, ServerContext
from tests.support.fake_engine import FakeEngine
from tests.support.null_workers import router_over
from tests.support.races import NEVER, Races, check_idle, check_results, soon


@pytest.mark.parametrize("streamed", [False, True])
async def test_the_loser_is_aborted(monkeypatch: pytest.MonkeyPatch, streamed: bool) -> None:
    races, slow, quick = Races(monkeypatch), FakeEngine(), FakeEngine()
    slow.gate, quick.gate = asyncio.Event(), asyncio.Event()
    servers = []
    for engine in (slow, quick):
        context: Any = ServerContext(engine)  # type: ignore[arg-type]
        context.phase = Phase.READY
        servers.append(TestServer(make_app(context)))
        await servers[-1].start_server()
    urls = tuple(str(server.make_url("")).rstrip("/") for server in servers)
    settings = {"hedge_after_secs": NEVER, "request_timeout_secs": 2 * NEVER, "hedge_max_percent": 100.0}
    try:
        async with router_over(urls=urls, policy="round_robin", **settings) as router:
            body = {"rid": "r", "input_ids": [1], "stream": streamed}
            task = asyncio.create_task(router.post("/generate", body))
            await soon(lambda: slow.started or task.done())
            races.fire()
            await soon(lambda: quick.started or task.done())
            quick.gate.set()
            status, _, got = await task
            assert (status, slow.started, quick.started) == (200, ["r"], ["r"]), got
            last = got if not streamed else got.split(b"\n\n")[-3].removeprefix(b"data: ")
            assert msgspec.json.decode(last)["output_ids"] == list(b"hi")
            await soon(lambda: slow.closed == slow.started)
            assert quick.closed == []
            await check_idle(router)
            await check_results(router, won=1)
    finally:
        for server in servers:
            await server.close()
