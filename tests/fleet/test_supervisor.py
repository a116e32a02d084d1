"""The supervisor over processes that are no servers of a model, with a router in this process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from sglang_lite.fleet import server_process, supervisor
from sglang_lite.fleet.local_backend import LocalBackend
from sglang_lite.fleet.router_client import RouterClient
from sglang_lite.fleet.spec import FleetSpec, checked_spec
from sglang_lite.fleet.supervisor import FleetError, Supervisor
from tests.support.fleets import family_of, server_at, wait_gone
from tests.support.null_workers import RouterUnderTest, router_over
from tests.support.server import ROOT

QUICK = {"check_seconds": 0.1, "drain_seconds": 10, "unhealthy_seconds": 1, "start_seconds": 20}


@pytest.fixture(autouse=True)
def stubs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas are stubs, and failures are tried again soon."""
    command = (sys.executable, "-m", "tests.support.stub_server", "serve")
    monkeypatch.setattr(server_process, "SERVE_COMMAND", command)
    monkeypatch.setattr(supervisor, "_FIRST_PAUSE", 0.05)
    monkeypatch.setattr(supervisor, "_HEALTH_SECONDS", 0.5)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def spec_of(count: int = 2, flags: str = "", **fields: Any) -> FleetSpec:
    return checked_spec({**QUICK, "replicas": [{"count": count, "flags": flags}], **fields})


class Running:
    """A supervisor, its router and the requests of a test."""

    def __init__(self, fleet: Supervisor, task: asyncio.Task[None], router: RouterUnderTest, client: Any) -> None:
        self.fleet, self.task, self.router, self.client = fleet, task, router, client

    @property
    def urls(self) -> set[str]:
        """Workers that the router uses."""
        return {worker.url for worker in self.router.context.registry.registered()}

    async def until(self, what: Callable[[], bool], seconds: float = 20) -> None:
        async with asyncio.timeout(seconds):
            while not what():
                if self.task.done():
                    self.task.result()
                await asyncio.sleep(0.02)

    async def generate(self) -> None:
        status, _, body = await self.router.post("/generate", {"text": "A"})
        assert (status, body) == (200, b'{"text": "done"}')

    async def end(self) -> None:
        self.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.task


@contextlib.asynccontextmanager
async def running(spec: FleetSpec) -> AsyncIterator[Running]:
    """Complete when entered, gone when left."""
    async with router_over() as router, RouterClient(router.url, None) as client:
        fleet = Supervisor(spec, LocalBackend(), client)
        made = Running(fleet, asyncio.create_task(fleet.run()), router, client)
        families: list[psutil.Process] = []
        try:
            await made.until(lambda: len(made.urls) == len(fleet.slots))
            yield made
            families = [process for url in made.urls for process in family_of(url)]
        finally:
            await made.end()
        wait_gone(families)
        assert not made.urls


async def test_servers_that_die_or_hang_are_replaced() -> None:
    async with running(spec_of()) as fleet:
        before = fleet.urls
        died, hung = sorted(before)
        families = [process for url in before for process in family_of(url)]
        server_at(died).kill()
        await fleet.until(lambda: died not in fleet.urls and len(fleet.urls) == 2)
        await fleet.generate()
        os.kill(server_at(hung).pid, signal.SIGSTOP)
        await fleet.until(lambda: hung not in fleet.urls and len(fleet.urls) == 2)
        await fleet.generate()
        wait_gone(families)


async def test_a_keeper_that_is_killed_takes_its_server_along() -> None:
    async with running(spec_of(1)) as fleet:
        (url,) = fleet.urls
        family = family_of(url)
        family[0].kill()
        await fleet.until(lambda: url not in fleet.urls and len(fleet.urls) == 1)
        wait_gone(family)


async def test_a_router_that_forgot_is_told_again() -> None:
    async with running(spec_of()) as fleet:
        urls = fleet.urls
        for worker in (await fleet.client.workers()).values():
            await fleet.router.session.delete(f"{fleet.router.url}/workers/{worker.id}")
        assert not fleet.urls
        await fleet.until(lambda: fleet.urls == urls)


async def test_prometheus_finds_the_replicas_that_there_are(tmp_path: Path) -> None:
    file = tmp_path / "targets.json"

    def servers() -> set[str]:
        groups = json.loads(file.read_text())
        assert groups[0] == {"targets": [fleet.router.url.removeprefix("http://")], "labels": {"job": "sglang-router"}}
        assert all(
            group["labels"] == {"job": "sglang-server", "group": "plain", "role": "plain"} for group in groups[1:]
        )
        return {f"http://{target}" for group in groups[1:] for target in group["targets"]}

    async with running(spec_of(targets_file=str(file))) as fleet:
        before = fleet.urls
        await fleet.until(lambda: servers() == before)
        server_at(min(before)).kill()
        await fleet.until(lambda: len(fleet.urls) == 2 and servers() == fleet.urls != before)
        assert [path.name for path in tmp_path.iterdir()] == ["targets.json"]


@pytest.mark.parametrize("surge", [False, True])
async def test_a_rolling_restart_loses_no_request(surge: bool) -> None:
    async with running(spec_of(surge=surge)) as fleet:
        before, most, stop = fleet.urls, 0, asyncio.Event()

        async def client() -> int:
            nonlocal most
            count = 0
            while not stop.is_set():
                await fleet.generate()
                most = max(most, len(fleet.urls))
                count += 1
            return count

        clients = [asyncio.create_task(client()) for _ in range(8)]
        await fleet.fleet.roll(spec_of(flags="--slow 0.03", surge=surge))
        stop.set()
        counts = await asyncio.gather(*clients)
        assert min(counts) > 0
        assert len(fleet.urls) == 2 and not fleet.urls & before
        assert most == (3 if surge else 2)
        for url in fleet.urls:
            assert "0.03" in server_at(url).cmdline()


async def test_a_rolling_restart_that_fails_goes_back() -> None:
    async with running(spec_of()) as fleet:
        with pytest.raises(FleetError, match="exited with code 3"):
            await fleet.fleet.roll(spec_of(flags="--exit 3"))
        await fleet.until(lambda: len(fleet.urls) == 2)
        await fleet.generate()
        with pytest.raises(FleetError, match="counts"):
            await fleet.fleet.roll(spec_of(3))


@pytest.mark.parametrize(("code", "attempts"), [(2, 1), (1, 5)])
async def test_servers_that_never_start_end_the_fleet(code: int, attempts: int, tmp_path: Path) -> None:
    spec = spec_of(1, f"--exit {code}", log_directory=str(tmp_path))
    async with router_over() as router, RouterClient(router.url, None) as client:
        with pytest.raises(FleetError, match=f"exited with code {code}"):
            await Supervisor(spec, LocalBackend(), client).run()
    assert len(list(tmp_path.glob("plain-0-*.log"))) == attempts


@pytest.mark.parametrize("at_once", [False, True])
async def test_the_end_waits_for_requests_unless_told_otherwise(at_once: bool) -> None:
    async with running(spec_of(1, "--slow 2")) as fleet:
        request = asyncio.create_task(fleet.router.post("/generate", {"text": "A"}))
        await fleet.until(lambda: fleet.router.context.leases.total == 1)
        if at_once:
            fleet.fleet.at_once.set()
        started = asyncio.get_running_loop().time()
        await fleet.end()
        seconds = asyncio.get_running_loop().time() - started
        status, _, body = await request
        assert (status == 200 and body == b'{"text": "done"}') is not at_once
        assert (seconds < 1.5) is at_once


async def test_a_router_that_is_away_costs_no_replica() -> None:
    """Nobody listens where the router should be: the replica is kept, and registered once the router is there."""
    async with router_over() as router:
        url = router.url
        async with RouterClient("http://127.0.0.1:9", None) as client:
            fleet = Supervisor(spec_of(1), LocalBackend(), client)
            task = asyncio.create_task(fleet.run())
            try:
                async with asyncio.timeout(20):
                    while fleet.slots[0].current is None:
                        await asyncio.sleep(0.02)
                placed = fleet.slots[0].current
                client.url = url
                async with asyncio.timeout(10):
                    while not fleet.slots[0].registered:
                        await asyncio.sleep(0.02)
                assert fleet.slots[0].current is placed
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)


async def test_an_address_that_is_no_router() -> None:
    async with router_over() as router, RouterClient(router.url + "/nowhere", None) as client:
        assert not await client.is_alive()
