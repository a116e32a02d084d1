"""Prefill and decode servers are restarted one after the other behind the router, under load: no request is lost."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import aiohttp
import msgspec
import pytest
from aiohttp.test_utils import TestServer

from sglang_lite.config import ServerConfig
from sglang_lite.router.app import make_app
from sglang_lite.router.context import RouterContext
from sglang_lite.router.options import RouterOptions, checked
from tests.support.disaggregated_pair import DECODE, PREFILL, Oracle, is_idle, make_model, prompt_of
from tests.support.server import ServerProcess, free_port
from tests.support.threaded_server import ThreadedServer, use_threads

OPTIONS = {
    "device": "cpu",
    "skip_tokenizer_init": True,
    "max_total_tokens": 1024,
    "max_running_requests": 4,
    "disaggregation_transfer_backend": "tcp",
    "disaggregation_verify_checksums": True,
    "drain_timeout": 60.0,
}
WORK = [(1, 5, 8), (2, 40, 30), (3, 17, 1), (4, 64, 12), (5, 33, 60)]
"""(seed, length, output) of the prompts."""


class Server(Protocol):
    url: str

    @property
    def is_running(self) -> bool: ...
    def terminate(self) -> None: ...
    async def wait(self) -> int: ...


class Process:
    """A real one."""

    def __init__(self, config: ServerConfig, log: Path) -> None:
        words = []
        names = (*OPTIONS, "model_path", "disaggregation_mode", "router_url", "disaggregation_bootstrap_port")
        for name in (*names, "engine_info_bootstrap_port"):
            if name != "device":
                value, flag = getattr(config, name), f"--{name.replace('_', '-')}"
                words += [flag] if value is True else [flag, *map(str, value if isinstance(value, list) else [value])]
        self._server = ServerProcess(words, log, port=config.port)
        self.url = self._server.url

    @property
    def is_running(self) -> bool:
        return self._server.process.poll() is None

    def terminate(self) -> None:
        self._server.process.send_signal(signal.SIGTERM)

    async def wait(self) -> int:
        return await asyncio.to_thread(self._server.wait_exit, 60)


Start = Callable[[ServerConfig], Server]


class Fleet:
    """Two servers of each role, which register themselves with a router in this process."""

    def __init__(self, model: Path, start: Start) -> None:
        self._start = start
        self.context = RouterContext(
            checked(RouterOptions(pd_disaggregation=True, policy="round_robin", retry_initial_backoff_ms=5.0))
        )
        self._router = TestServer(make_app(self.context), host="127.0.0.1")
        self._model = model
        self._configs: dict[str, ServerConfig] = {}
        self.servers: dict[str, Server] = {}

    @property
    def url(self) -> str:
        return str(self._router.make_url("")).rstrip("/")

    async def open(self) -> None:
        await self._router.start_server()
        for role in (PREFILL, DECODE):
            for number in (1, 2):
                options = {**OPTIONS, "model_path": str(self._model), "disaggregation_mode": role}
                if role == PREFILL:
                    options |= {"disaggregation_bootstrap_port": free_port(), "engine_info_bootstrap_port": 0}
                if (role, number) == (PREFILL, 2):
                    options["drain_timeout"] = 0.0  # it gives up what it has, which another pair does then
                config = ServerConfig(**options, host="127.0.0.1", port=free_port(), router_url=[self.url])
                self._configs[f"{role}{number}"] = config
        for name in self._configs:
            await self.start(name)

    async def start(self, name: str) -> None:
        """Start a server and wait until the router uses it."""
        server = self.servers[name] = self._start(self._configs[name])
        async with asyncio.timeout(120):
            while not any(w.url == server.url and w.registered for w in self.context.registry.workers.values()):
                assert server.is_running
                await asyncio.sleep(0.01)

    async def settled(self) -> None:
        """Wait until nobody has a request, a page or a session."""
        async with aiohttp.ClientSession() as session, asyncio.timeout(60):
            for name, server in self.servers.items():
                while True:
                    async with session.get(server.url + "/v1/loads") as reply:
                        (load,) = (await reply.json())["loads"]
                    if is_idle(load):
                        break
                    await asyncio.sleep(0.02)
                assert load["disaggregation"]["transfers"] > 0, f"nothing went over {name}"

    async def close(self) -> None:
        for server in self.servers.values():
            server.terminate()
        await asyncio.gather(*(server.wait() for server in self.servers.values()))
        await self._router.close()


@asynccontextmanager
async def fleet(model: Path, start: Start) -> AsyncIterator[Fleet]:
    made = Fleet(model, start)
    try:
        await made.open()
        yield made
    finally:
        await made.close()


class Load:
    """Clients that go on until they are told to stop, and what they got."""

    def __init__(self, session: aiohttp.ClientSession, url: str, expected: list[list[int]]) -> None:
        self._session, self._url, self._expected = session, url, expected
        self._stop = asyncio.Event()
        self.failures: list[str] = []
        self.answers = 0
        self._tasks = [asyncio.create_task(self._client(number)) for number in range(5)]

    async def _client(self, number: int) -> None:
        while not self._stop.is_set():
            index, kind = number % len(WORK), number % 3
            number += 1
            chosen = [index, (index + 1) % len(WORK)] if kind == 2 else [index]
            prompts = [prompt_of(*WORK[one][:2]) for one in chosen]
            sampling = [{"max_new_tokens": WORK[one][2], "temperature": 0, "ignore_eos": True} for one in chosen]
            body: dict[str, Any] = {"input_ids": prompts, "sampling_params": sampling}
            if kind < 2:
                body = {"input_ids": prompts[0], "sampling_params": sampling[0], "stream": kind == 1}
            async with self._session.post(self._url + "/generate", json=body) as reply:
                data = await reply.read()
            if reply.status != 200 or tokens_of(data) != [self._expected[one] for one in chosen]:
                self.failures.append(f"{kind} {index}: {reply.status} {data[-300:]!r}")
            self.answers += 1
            await asyncio.sleep(0.01)

    async def more(self, count: int) -> None:
        """Wait for ``count`` further answers."""
        wanted = self.answers + count
        async with asyncio.timeout(200):
            while self.answers < wanted:
                await asyncio.sleep(0.01)

    async def stop(self) -> None:
        self._stop.set()
        await asyncio.gather(*self._tasks)


def tokens_of(data: bytes) -> list[list[int]]:
    """Output ids of an answer, a batch or a whole stream; nothing of one that is not whole."""
    if data.startswith(b"data: "):
        *_, last, end, rest = data.split(b"\n\n")
        if (end, rest) != (b"data: [DONE]", b""):
            return []
        data = last.removeprefix(b"data: ")
    answer = msgspec.json.decode(data)
    return [one["output_ids"] for one in (answer if isinstance(answer, list) else [answer])]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def expected(model: Path) -> Iterator[list[list[int]]]:
    """What one engine without roles gives."""
    with Oracle.of(model) as oracle:
        yield [oracle.tokens(prompt_of(seed, length), count) for seed, length, count in WORK]


async def check_restarts(fleet: Fleet, expected: list[list[int]]) -> None:
    """Each server goes as soon as the one before is back, as Kubernetes does it."""
    async with aiohttp.ClientSession() as session:
        load = Load(session, fleet.url, expected)
        await load.more(10)
        for name, server in list(fleet.servers.items()):
            server.terminate()
            assert await server.wait() == 0
            assert len(fleet.context.registry.workers) == 3
            await load.more(10)
            await fleet.start(name)
        await load.more(20)
        await load.stop()
        await fleet.settled()
    assert not load.failures
    assert fleet.context.leases.total == 0


@pytest.mark.timeout(600)
async def test_a_rolling_restart_of_pairs(
    model: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_threads(monkeypatch)
    async with fleet(model, ThreadedServer) as servers:
        await check_restarts(servers, expected)


@pytest.mark.skipif(
    os.environ.get("SGLANG_LITE_FULL_MATRIX") != "1",
    reason="eight starts of processes; SGLANG_LITE_FULL_MATRIX=1 runs them, the test above does the same in threads",
)
@pytest.mark.timeout(600)
async def test_a_rolling_restart_of_pairs_of_processes(model: Path, expected: list[list[int]], tmp_path: Path) -> None:
    started: list[Process] = []

    def start(config: ServerConfig) -> Process:
        started.append(Process(config, tmp_path / f"{len(started)}.log"))
        return started[-1]

    async with fleet(model, start) as servers:
        await check_restarts(servers, expected)
    for log in tmp_path.glob("*.log"):
        assert "Traceback" not in log.read_text(), log.read_text()[-3000:]
