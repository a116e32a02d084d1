"""A supervisor over replicas that live in this process, and routers that are none or somebody else's."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
from collections.abc import AsyncIterator
from typing import Any

import psutil
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from sglang_lite.fleet import server_process, supervisor
from sglang_lite.fleet.backend import ReplicaError
from sglang_lite.fleet.router_client import RouterClient, RouterUnreachableError
from sglang_lite.fleet.router_process import OwnedRouter
from sglang_lite.fleet.run import _until
from sglang_lite.fleet.server_process import Endpoint, Launch
from sglang_lite.fleet.spec import Resources, checked_spec
from sglang_lite.fleet.supervisor import FleetError, Supervisor
from sglang_lite.types import StartupError
from tests.support.fleets import wait_gone
from tests.support.null_workers import NullWorker, router_over
from tests.support.server import ROOT

QUICK = {"check_seconds": 0.01, "drain_seconds": 1, "unhealthy_seconds": 60, "start_seconds": 20}


class PlayedReplica:
    """At the address of a worker that runs; ``code`` is what it exits with."""

    def __init__(self, url: str, fails: bool) -> None:
        self.url = url
        self.fails = fails
        self.code: int | None = None

    async def start(self) -> Endpoint:
        if self.fails:
            raise ReplicaError("no room")
        return Endpoint(self.url, None, 1)

    async def exit_code(self) -> int | None:
        return self.code

    async def drain(self) -> None:
        self.code = 0

    async def kill(self) -> None:
        self.code = self.code or 137


class PlayedBackend:
    """Replicas at the addresses of ``urls``, by the numbers of their places; ``bad`` flags do not start."""

    def __init__(self, *urls: str, bad: str = "none") -> None:
        self.urls = urls
        self.bad = bad
        self.placed: list[PlayedReplica] = []
        self.launches: list[Launch] = []

    async def open(self) -> None:
        """Nothing to do."""

    def place(self, launch: Launch, resources: Resources) -> PlayedReplica:
        place = int(launch.name.split("-")[1])
        self.launches.append(launch)
        self.placed.append(PlayedReplica(self.urls[place], self.bad in launch.flags and place == len(self.urls) - 1))
        return self.placed[-1]

    async def close(self) -> None:
        """Nothing to do."""


@contextlib.asynccontextmanager
async def workers(count: int) -> AsyncIterator[list[NullWorker]]:
    async with contextlib.AsyncExitStack() as stack:
        found = [NullWorker() for _ in range(count)]
        for worker in found:
            await worker.server.start_server()
            stack.push_async_callback(worker.server.close)
        yield found


async def until(what: Any) -> None:
    async with asyncio.timeout(30):
        while not what():
            await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def supervised(fleet: Supervisor) -> AsyncIterator[None]:
    task = asyncio.create_task(fleet.run())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def test_a_replica_that_dies_again_and_again_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It serves each time, so no start has failed."""
    monkeypatch.setattr(supervisor, "_FIRST_PAUSE", 50.0)
    caplog.set_level(logging.WARNING)
    async with workers(1) as (worker,), router_over() as router, RouterClient(router.url, None) as client:
        backend = PlayedBackend(worker.url)
        fleet = Supervisor(checked_spec({**QUICK, "replicas": [{}]}), backend, client)
        async with supervised(fleet):
            for loss in (1, 2):
                await until(lambda loss=loss: len(backend.placed) == loss and fleet.slots[0].current is not None)
                backend.placed[-1].code = 1
            await until(lambda: "again in 50 s" in caplog.text)
            assert len(backend.placed) == 2 and fleet.slots[0].current is None


async def test_ranks_of_a_router_are_one_replica() -> None:
    """With --dp-aware a router lists URL@0 and URL@1: they are told of once, and leave together."""
    worker = NullWorker(dp_size=2)
    async with router_over(worker, dp_aware=True) as router, RouterClient(router.url, None) as client:
        found = await client.workers()
        assert list(found) == [worker.url] and found[worker.url].is_registered
        await client.remove(Endpoint(worker.url, None, 1))
        assert not router.context.registry.workers


async def test_a_refused_replica_does_not_keep_the_others_away() -> None:
    async with workers(1) as (worker,), router_over() as router, RouterClient(router.url, None) as client:
        spec = checked_spec({**QUICK, "replicas": [{"count": 2}]})
        fleet = Supervisor(spec, PlayedBackend("http://[::1", worker.url), client)
        fleet.slots[0].current = supervisor.Placed("a", "plain", PlayedReplica("", False), Endpoint("http://", None, 1))
        fleet.slots[1].current = supervisor.Placed(
            "b", "plain", PlayedReplica("", False), Endpoint(worker.url, None, 2)
        )
        telling = asyncio.create_task(fleet.registrar.run())
        await until(lambda: router.context.registry.registered())
        telling.cancel()
        assert not fleet.slots[0].registered


@pytest.mark.parametrize("body", ["hello", "[]", '{"workers": [{"url": 3}]}', '{"workers": {}}'])
async def test_a_server_that_is_no_router(body: str) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(text=body)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    server = TestServer(app)
    await server.start_server()
    try:
        async with RouterClient(str(server.make_url("/")), None) as client:
            with pytest.raises(RouterUnreachableError, match="not the answer of a router"):
                await client.workers()
    finally:
        await server.close()


async def test_a_port_that_somebody_else_has() -> None:
    """The other one answers /healthz, too: it must not be taken for the fleet's router."""
    async with router_over() as other, RouterClient(other.url, None) as client:
        router = {"host": "127.0.0.1", "port": int(other.url.rpartition(":")[2])}
        owned = OwnedRouter(checked_spec({"replicas": [{}], "router": router}), {})
        with pytest.raises(StartupError, match=f"router.port {router['port']}"):
            await owned.start(client)
        await owned.stop(asyncio.Event())


async def test_a_start_that_is_not_waited_for() -> None:
    stop, begun, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def work() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    running = asyncio.create_task(_until(work(), stop))
    await begun.wait()
    stop.set()
    assert await running is False and ended.is_set()

    async def fails() -> None:
        raise StartupError("no")

    with pytest.raises(StartupError):
        await _until(fails(), asyncio.Event())


async def test_what_a_rolling_restart_cannot_change_and_what_it_goes_back_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "_FIRST_PAUSE", 0.01)
    async with workers(2) as (first, second), router_over() as router, RouterClient(router.url, None) as client:
        base: dict[str, Any] = {**QUICK, "replicas": [{"count": 2}]}
        backend = PlayedBackend(first.url, second.url, bad="--bad")
        fleet = Supervisor(checked_spec(base), backend, client)
        async with supervised(fleet):
            await until(lambda: len(router.context.registry.registered()) == 2)
            for change in ({"router": {"port": 1}}, {"backend": "ray"}, {"targets_file": "targets.json"}):
                with pytest.raises(FleetError, match=next(iter(change))):
                    await fleet.roll(checked_spec({**base, **change}))
            group = {"count": 2, "flags": ["--model-path", "--bad"]}
            monkeypatch.setattr("sglang_lite.fleet.spec.check_flags", lambda title, words: None)
            with pytest.raises(FleetError, match="no room"):
                await fleet.roll(checked_spec({**base, "replicas": [group]}))
            assert [slot.group.flags for slot in fleet.slots] == [[], []]
            await until(lambda: fleet.slots[1].current is not None)


async def test_a_keeper_that_hangs_does_not_keep_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_process, "_KILL_SECONDS", 0.3)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    command = [sys.executable, "-c", "import time; print('here', flush=True); time.sleep(600)"]
    managed = server_process.ManagedProcess(command, Launch("sleeper"))
    keeper = psutil.Process(managed.process_id)
    await until(lambda: keeper.children())
    (sleeper,) = keeper.children()
    keeper.suspend()
    await managed.end()
    await until(lambda: managed.exit_code() is not None)
    assert managed.exit_code() == -signal.SIGKILL
    wait_gone([sleeper])
