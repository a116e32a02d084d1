"""Workers are restarted one after the other under load, and no request is lost."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec

from tests.router.test_proxy import CHAT, CHAT_PATH, hang
from tests.support.null_workers import NullWorker, RouterUnderTest, router_over
from tests.support.router_process import router_for
from tests.support.server import ServerProcess, free_port

UNARY = {"text": "A", "sampling_params": {"temperature": 0, "max_new_tokens": 24}}
JSON = {"content-type": "application/json"}
STREAM = {"model": "chain", "prompt": "A", "max_tokens": 120, "temperature": 0, "stream": True}


class Load:
    """Clients that go on until they are told to stop, and what they got."""

    def __init__(self, router: RouterUnderTest) -> None:
        self._router = router
        self._stop = asyncio.Event()
        self.failures: list[str] = []
        self.answers = 0
        self._tasks = [asyncio.create_task(self._client(number)) for number in range(4)]

    async def _client(self, number: int) -> None:
        path, body = ("/generate", UNARY) if number % 2 else ("/v1/completions", STREAM)
        while not self._stop.is_set():
            status, _, data = await self._router.post(path, body, headers=JSON)
            self.answers += 1
            if status != 200 or not self._is_whole(data, body):
                self.failures.append(f"{path} {status} {data[-200:]!r}")
            await asyncio.sleep(0.1)

    def _is_whole(self, data: bytes, body: dict[str, Any]) -> bool:
        if "stream" not in body:
            return msgspec.json.decode(data)["text"] == "BCDA" * 6
        return data.endswith(b"data: [DONE]\n\n") and data.count(b'"text"') >= 30 and b'"error"' not in data

    async def more(self, count: int) -> None:
        """Wait for ``count`` further answers."""
        wanted = self.answers + count
        async with asyncio.timeout(60):
            while self.answers < wanted:
                await asyncio.sleep(0.02)

    async def stop(self) -> None:
        self._stop.set()
        await asyncio.gather(*self._tasks)


async def test_a_rolling_restart_loses_nothing(chain_model: Path, tmp_path: Path) -> None:
    """The next worker goes as soon as the last one says that it is ready, as Kubernetes does it."""
    words = ["--model-path", str(chain_model), "--served-model-name", "chain"]
    ports = [free_port(), free_port()]
    running = [ServerProcess(words, tmp_path / f"{port}-1", port=port) for port in ports]
    try:
        await asyncio.gather(*(asyncio.to_thread(server.wait_ready) for server in running))
        async with router_for([server.url for server in running], policy="round_robin") as router:
            load = Load(router)
            await load.more(10)
            for index, port in enumerate(ports):
                running[index].process.terminate()
                assert await asyncio.to_thread(running[index].wait_exit, 30) == 0
                await load.more(10)
                running[index] = ServerProcess(words, tmp_path / f"{port}-2", port=port)
                await asyncio.to_thread(running[index].wait_ready)
            await load.more(10)
            await load.stop()
            assert not load.failures
            assert router.context.leases.total == 0
    finally:
        for server in running:
            server.__exit__()


async def test_a_worker_that_is_gone_is_asked_for_until_it_is_back() -> None:
    """It is used at once when it is the last hope, and otherwise as soon as it has introduced itself again."""
    first, second = NullWorker(), NullWorker()
    options = {"policy": "round_robin", "worker_startup_check_interval": 0.02, "cb_failure_threshold": 1}
    async with router_over(first, second, **options) as router:
        gone = router.context.registry.workers[first.url]
        port = first.server.port
        await first.server.close()
        for _ in range(4):
            assert (await router.post(CHAT_PATH, CHAT))[0] == 200
        async with asyncio.timeout(20):
            while not gone.lost:
                await asyncio.sleep(0.005)
        assert not gone.healthy
        again = NullWorker(served_model_name="m", model_path="other")
        again.server.port = port
        await again.server.start_server()
        try:
            async with asyncio.timeout(20):
                while not gone.healthy:
                    await asyncio.sleep(0.005)
            assert "other" in gone.models and gone.breaker.allows(router.context.now)
            await second.server.close()
            assert [(await router.post(CHAT_PATH, CHAT))[0] for _ in range(4)] == [200] * 4
        finally:
            await again.server.close()


async def test_a_worker_that_answers_its_check_stays() -> None:
    """A request that fails makes a worker suspect, no more."""
    worker = NullWorker()
    worker.answer = hang
    async with router_over(worker, stale_request_timeout_secs=0.1) as router:
        context = router.context
        context.suspect(context.registry.workers[worker.url])
        assert (await router.post(CHAT_PATH, CHAT))[0] == 504
        assert context.registry.workers[worker.url].healthy
