"""Hedging between workers that speak gRPC, and between the two protocols: a call that lost is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc
import msgspec
import pytest

from sglang_lite.rpc.generated.sglang.runtime.v1 import sglang_pb2_grpc
from tests.router.test_foreign_grpc_workers import ScriptedService, two_tokens
from tests.router.test_proxy import code_of
from tests.support.null_workers import NullWorker, RouterUnderTest, router_over
from tests.support.races import NEVER, Races, check_idle, check_results, soon

BODY = {"text": "A", "rid": "r", "sampling_params": {"max_new_tokens": 2, "temperature": 0}}


class SlowService(ScriptedService):
    """Answers when it may.

    Attributes:
        cancelled: calls that were.
        fails: the code that calls end with.
    """

    def __init__(self) -> None:
        super().__init__()
        self.open = asyncio.Event()
        self.cancelled = 0
        self.fails: grpc.StatusCode | None = None
        self.generate = self._play

    async def _play(self, request: Any, call: Any) -> AsyncIterator[Any]:
        try:
            await self.open.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.fails is not None:
            await call.abort(self.fails, "it failed")
        async for message in two_tokens(request, call):
            yield message


@asynccontextmanager
async def services(*workers: SlowService, others: tuple[NullWorker, ...] = ()) -> AsyncIterator[RouterUnderTest]:
    async with AsyncExitStack() as stack:
        urls = []
        for worker in workers:
            server = grpc.aio.server()
            sglang_pb2_grpc.add_SglangServiceServicer_to_server(worker, server)  # type: ignore[no-untyped-call]
            urls.append(f"grpc://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
            await server.start()
            stack.push_async_callback(server.stop, None)
        settings = {"hedge_after_secs": NEVER, "request_timeout_secs": 2 * NEVER, "hedge_max_percent": 100.0}
        router = await stack.enter_async_context(
            router_over(*others, urls=tuple(urls), policy="round_robin", **settings)
        )
        yield router
        await check_idle(router)
        links = router.context.grpc_workers
        assert links is not None
        await soon(lambda: not any(link.users for link in links._links.values()))


@pytest.fixture
def races(monkeypatch: pytest.MonkeyPatch) -> Races:
    return Races(monkeypatch)


async def start(router: RouterUnderTest, worker: SlowService, **more: Any) -> asyncio.Task[Any]:
    task = asyncio.create_task(router.post("/generate", {**BODY, **more}))
    await soon(lambda: worker.seen)
    return task


@pytest.mark.parametrize("streamed", [False, True])
async def test_the_hedge_wins_and_the_other_call_is_cancelled(races: Races, streamed: bool) -> None:
    first, second = SlowService(), SlowService()
    async with services(first, second) as router:
        task = await start(router, first, stream=streamed)
        races.fire()
        second.open.set()
        status, _, body = await task
        text = body if not streamed else body.split(b"\n\n")[-3].removeprefix(b"data: ")
        assert status == 200 and msgspec.json.decode(text)["text"] == "BC"
        await soon(lambda: first.cancelled)
        assert [worker.seen[0].options.request_id for worker in (first, second)] == ["r", "r"]
        assert [worker.breaker._failures for worker in router.context.registry.targets()] == [0, 0]
        await check_results(router, won=1)


@pytest.mark.parametrize("streamed", [False, True])
async def test_the_first_wins_and_the_hedge_is_cancelled(races: Races, streamed: bool) -> None:
    first, second = SlowService(), SlowService()
    async with services(first, second) as router:
        task = await start(router, first, stream=streamed)
        races.fire()
        await soon(lambda: second.seen)
        first.open.set()
        assert (await task)[0] == 200
        await soon(lambda: second.cancelled)
        await check_results(router, lost=1)


async def test_both_fail(races: Races) -> None:
    first, second = SlowService(), SlowService()
    first.fails = second.fails = grpc.StatusCode.UNAVAILABLE
    async with services(first, second) as router:
        task = await start(router, first)
        races.fire()
        await soon(lambda: second.seen)
        second.open.set()
        first.open.set()
        status, _, body = await task
        assert (status, code_of(body)) == (502, "upstream_unreachable")
        assert all(worker.breaker._failures >= 1 for worker in router.context.registry.targets())
        await check_results(router, failed=1)


async def test_a_client_that_leaves_ends_both_calls(races: Races) -> None:
    first, second = SlowService(), SlowService()
    async with services(first, second) as router:
        task = await start(router, first, stream=True)
        races.fire()
        await soon(lambda: second.seen)
        task.cancel()
        await soon(lambda: first.cancelled and second.cancelled)
        await check_results(router, abandoned=1)


async def test_a_hedge_may_speak_the_other_protocol(races: Races) -> None:
    slow, other = SlowService(), NullWorker()
    async with services(slow, others=(other,)) as router:
        assert (await router.post("/generate", BODY))[0] == 200  # that was the other one's turn
        task = await start(router, slow)
        races.fire()
        assert msgspec.json.decode((await task)[2])["worker"] == other.url
        await soon(lambda: slow.cancelled)
        await check_results(router, won=1)
