"""``--workers N``: several router processes on one port."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import psutil
import pytest
from aiohttp import web

from sglang_lite.router import sibling_workers
from sglang_lite.router.app import make_app
from sglang_lite.router.balance import by_beginning, least_loaded, out_of_balance
from sglang_lite.router.breaker import BreakerLimits
from sglang_lite.router.context import RouterContext
from sglang_lite.router.options import RouterOptions
from sglang_lite.router.shared_loads import LoadCell, SharedLoads
from sglang_lite.router.siblings import Siblings
from sglang_lite.router.worker_routes import worker_id
from sglang_lite.router.workers import Registry
from tests.support.null_workers import NullWorker
from tests.support.server import ROOT, free_port

BODY = {"text": "a", "sampling_params": {"max_new_tokens": 1}}


class Family:
    """A router of several processes."""

    def __init__(self, process: asyncio.subprocess.Process, port: int) -> None:
        self.process = process
        self.url = f"http://127.0.0.1:{port}"

    @property
    def children(self) -> set[int]:
        return {child.pid for child in psutil.Process(self.process.pid).children()}

    async def call(self, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
        """A call over a connection of its own, so that the kernel chooses the process anew."""
        async with (
            aiohttp.ClientSession() as session,
            session.request(method, self.url + path, json=body) as response,
        ):
            return response.status, await response.read()

    async def workers(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = msgspec.json.decode((await self.call("GET", "/workers"))[1])["workers"]
        return found

    async def all_know(self, count: int) -> None:
        """Wait until a dozen answers in a row tell of ``count`` registered workers."""
        async with asyncio.timeout(60):
            agreed = 0
            while agreed < 12:
                try:
                    known = sum(worker["is_registered"] for worker in await self.workers())
                except aiohttp.ClientError:
                    known = -1
                agreed = agreed + 1 if known == count else 0
                if not agreed:
                    await asyncio.sleep(0.05)


@asynccontextmanager
async def family(*workers: NullWorker, port: int | None = None) -> AsyncIterator[Family]:
    async with AsyncExitStack() as stack:
        for worker in workers:
            await worker.server.start_server()
            stack.push_async_callback(worker.server.close)
        port = port or free_port()
        words = ["--host", "127.0.0.1", "--port", str(port), "--workers", "2", "--log-level", "warn"]
        words += ["--worker-urls", *(worker.url for worker in workers)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "sglang_lite", "router", *words, env=environment, stderr=asyncio.subprocess.PIPE
        )
        try:
            yield Family(process, port)
        finally:
            if process.returncode is None:
                process.terminate()
            await process.wait()


async def test_two_processes_are_one_router() -> None:
    """Changes reach both, counters are added up, a process that is killed comes back and knows what happened."""
    first, second, third = NullWorker(), NullWorker(), NullWorker()
    await third.server.start_server()
    try:
        async with family(first, second) as router:
            await router.all_know(2)
            assert (await router.call("POST", "/workers", {"url": third.url}))[0] == 202
            await router.all_know(3)
            gone = next(worker for worker in await router.workers() if worker["url"] == second.url)
            assert (await router.call("DELETE", f"/workers/{gone['id']}"))[0] == 202
            assert (await router.call("DELETE", f"/workers/{gone['id']}"))[0] == 404
            await router.all_know(2)
            assert [(await router.call("POST", "/generate", BODY))[0] for _ in range(30)] == [200] * 30
            line = b'sgl_router_requests_total{path="/generate",status="200"} '
            metrics = (await router.call("GET", "/metrics"))[1].splitlines()
            assert [text.removeprefix(line) for text in metrics if text.startswith(line)] == [b"30.0"]
            assert (await router.call("GET", "/internal/workers"))[0] == 404

            before = router.children
            assert len(before) == 2
            os.kill(min(before), signal.SIGKILL)  # the first one, which makes the changes
            async with asyncio.timeout(10):
                while len(router.children) < 2 or min(before) in router.children:
                    await asyncio.sleep(0.02)
            await router.all_know(2)
            assert {worker["url"] for worker in await router.workers()} == {first.url, third.url}
            assert not second.count("/generate") and first.count("/generate") + third.count("/generate") == 30
            assert (await router.call("POST", "/generate", BODY))[0] == 200
    finally:
        await third.server.close()


@asynccontextmanager
async def process(
    directory: Path, number: int, loads: SharedLoads, *urls: str, is_new: bool = False
) -> AsyncIterator[tuple[RouterContext, web.AppRunner]]:
    """One process of three, in this one; it does not listen yet."""
    siblings = Siblings(directory, number, loads, is_new=is_new)
    context = RouterContext(RouterOptions(workers=3, worker_urls=urls), siblings=siblings)
    runner = web.AppRunner(make_app(context))
    await runner.setup()
    try:
        yield context, runner
    finally:
        await runner.cleanup()
        await siblings.close()


async def listen(running: tuple[RouterContext, web.AppRunner]) -> None:
    context, runner = running
    assert context.siblings is not None
    context.siblings.path.unlink(missing_ok=True)
    await web.UnixSite(runner, context.siblings.path).start()


async def agree(*running: tuple[RouterContext, web.AppRunner]) -> dict[str, dict[str, str]]:
    """Wait until all have the same workers; address -> labels."""
    async with asyncio.timeout(10):
        while True:
            first, *others = ({w.url: w.labels for w in one[0].registry.workers.values()} for one in running)
            if all(first == other for other in others):
                return first
            await asyncio.sleep(0.005)


async def test_changes_that_a_process_misses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it takes the workers over but does not listen yet, and when process 0 dies before it has told all."""
    monkeypatch.setattr(sibling_workers, "LOOK_SECONDS", 0.01)
    old, kept, new = (f"http://127.0.0.1:1/{name}" for name in ("old", "kept", "new"))
    loads = SharedLoads(3)
    connector = aiohttp.UnixConnector(path=str(tmp_path / "0.sock"))
    async with (
        process(tmp_path, 1, loads, old, kept) as one,
        process(tmp_path, 2, loads, old, kept) as two,
        aiohttp.ClientSession(connector=connector) as session,
    ):
        await listen(one)
        async with process(tmp_path, 0, loads, old, kept) as zero:
            await listen(zero)
            for labels in ({"instance": "1"}, {"instance": "2"}):
                async with session.post("http://r/workers", json={"url": new, "labels": labels}) as response:
                    assert response.status == 202
            name = worker_id(zero[0].registry.workers[old])
            async with session.delete(f"http://r/workers/{name}") as response:
                assert response.status == 202
            expected = {kept: {}, new: {"instance": "2"}}
            assert await agree(zero, one) == expected  # was told
            assert await agree(zero, two) == expected  # asks
            await listen(two)
            # The next one is made by process 0 alone, as if it had died there.
            zero[0].registry.remove(kept)
            loads.revision += 1
        async with process(tmp_path, 0, loads, old, kept, is_new=True) as again:
            await listen(again)
            assert await agree(again, one, two) == expected
            async with session.post("http://r/workers", json={"url": old}) as response:
                assert response.status == 202
            assert await agree(again, one, two) == {**expected, old: {}}
            async with asyncio.timeout(10):
                while {running[0].siblings.revision for running in (again, one, two)} != {loads.revision}:  # type: ignore[union-attr]
                    await asyncio.sleep(0.005)


async def test_loads_are_one_and_die_with_their_process() -> None:
    """Both processes show the requests of both; those of a killed one are gone."""
    worker = NullWorker()
    leave = asyncio.Event()

    async def wait(request: web.Request, data: bytes) -> web.StreamResponse:
        await leave.wait()
        return web.json_response({})

    worker.answer = wait
    async with family(worker) as router:
        await router.all_know(1)
        clients = [asyncio.create_task(router.call("POST", "/generate", BODY)) for _ in range(16)]
        async with asyncio.timeout(10):
            while worker.count("/generate") < 16:
                await asyncio.sleep(0.02)
        assert {(await router.workers())[0]["load"] for _ in range(12)} == {16}
        os.kill(max(router.children), signal.SIGKILL)
        await router.all_know(1)
        left = {(await router.workers())[0]["load"] for _ in range(12)}
        leave.set()
        results = await asyncio.gather(*clients, return_exceptions=True)
        answered = sum(result == (200, b"{}") for result in results)
        assert left == {answered} and answered < 16


async def test_it_ends_as_a_whole() -> None:
    """SIGTERM to the parent, or its death, ends all; a port that is taken is said."""
    async with family(NullWorker()) as router:
        await router.all_know(1)
        children = router.children
        async with family(port=int(router.url.rpartition(":")[2])) as other:
            assert other.process.stderr is not None
            assert b"cannot listen on 127.0.0.1" in await other.process.stderr.read()
            assert await other.process.wait() == 1
        router.process.terminate()
        assert await router.process.wait() == 0
        assert not any(map(psutil.pid_exists, children))
    async with family(NullWorker()) as router:
        await router.all_know(1)
        children = router.children
        router.process.kill()
        await router.process.wait()
        async with asyncio.timeout(10):
            while any(map(psutil.pid_exists, children)):
                await asyncio.sleep(0.02)


def test_shared_loads() -> None:
    table = SharedLoads(3)
    cells = {(process, url): table.cell(process, url) for process in range(3) for url in ("http://a", "http://b")}
    for (process, url), cell in cells.items():
        cell.add(process + 1 if url == "http://a" else 10)
    assert {cells[process, "http://a"].total for process in range(3)} == {6}
    assert cells[0, "http://b"].total == 30
    table.clear(2)
    assert cells[0, "http://a"].total == 3
    assert table.cell(1, "http://a").total == 3


class Restless(LoadCell):
    """A load that other processes change between two looks."""

    __slots__ = ()

    @property
    def total(self) -> int:
        self.add(1)
        return super().total


def test_loads_that_change_while_they_are_compared() -> None:
    registry = Registry(BreakerLimits(), lambda worker: None)
    workers = [registry.add(f"http://w{number}") for number in range(2)]
    for number, worker in enumerate(workers):
        worker.cell = Restless(memoryview(bytearray(8)).cast("i"), [number], 0)
    for turn in range(9):
        assert least_loaded(workers, turn) in workers
        assert by_beginning(workers, b"x", 0, turn) in workers
        assert not out_of_balance(workers, 5, 1.5)


def test_a_beginning_belongs_to_a_worker() -> None:
    registry = Registry(BreakerLimits(), lambda worker: None)
    workers = [registry.add(f"http://w{number}") for number in range(4)]
    owners = {number: by_beginning(workers, b"%d" % number * 600 + b"x", 4, 0) for number in range(100, 300)}
    assert len({id(owner) for owner in owners.values()}) == 4
    for number, owner in owners.items():
        assert by_beginning(list(reversed(workers)), b"%d" % number * 600 + b"y", 4, 1) is owner
    owners[100].running = 5
    assert by_beginning(workers, b"100" * 600, 4, 0) is not owners[100]
