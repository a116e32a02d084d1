"""Servers for tests: the application over a real engine in this process, or a whole server process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self

import aiohttp
import msgspec
from aiohttp.test_utils import TestServer

from sglang_lite.config import ServerConfig
from sglang_lite.engine.async_engine import AsyncEngine
from sglang_lite.server.app import make_app
from sglang_lite.server.context import ServerContext
from sglang_lite.server.run import warm_up

ROOT = Path(__file__).parents[2]


class Reply:
    """Status, headers and body of an HTTP reply."""

    def __init__(self, status: int, headers: Any, body: bytes) -> None:
        self.status = status
        self.headers = headers
        self.body = body

    @property
    def text(self) -> str:
        return self.body.decode()

    def json(self) -> Any:
        return msgspec.json.decode(self.body)

    @property
    def events(self) -> list[Any]:
        """The events of a stream; ``[DONE]`` stays text."""
        return [read_event(block) for block in self.body.split(b"\n\n") if block.strip()]


def read_event(block: bytes) -> Any:
    """One server-sent event: JSON or the text ``[DONE]``."""
    assert block.startswith(b"data: "), block
    data = block.removeprefix(b"data: ").strip()
    return "[DONE]" if data == b"[DONE]" else msgspec.json.decode(data)


class LocalServer:
    """The application on a loopback port of this process, over an engine with its own core process.

    Attributes:
        url: where it listens, without a slash at the end.
        session: a client for it.
    """

    def __init__(self, engine: AsyncEngine, context: ServerContext, server: TestServer, session: Any) -> None:
        self.engine = engine
        self.context = context
        self.url = str(server.make_url("/")).rstrip("/")
        self.session: aiohttp.ClientSession = session

    async def call(self, method: str, path: str, json: Any = None, **options: Any) -> Reply:
        """One request and its whole reply."""
        async with self.session.request(method, self.url + path, json=json, **options) as response:
            return Reply(response.status, response.headers, await response.read())

    async def get(self, path: str, **options: Any) -> Reply:
        return await self.call("GET", path, **options)

    async def post(self, path: str, json: Any = None, **options: Any) -> Reply:
        return await self.call("POST", path, json, **options)

    async def generate(self, text: str | None = None, **fields: Any) -> Any:
        """A unary /generate with temperature 0; keywords of ``sampling`` go into its parameters."""
        body = greedy(text, **fields)
        reply = await self.post("/generate", body)
        assert reply.status == 200, reply.text
        return reply.json()

    async def load(self) -> dict[str, Any]:
        """The first entry of /v1/loads."""
        load: dict[str, Any] = (await self.get("/v1/loads")).json()["loads"][0]
        return load

    async def idle(self, seconds: float = 2.0) -> dict[str, Any]:
        """Wait until nothing runs or waits; fails after ``seconds``."""
        deadline = time.monotonic() + seconds
        while True:
            load = await self.load()
            if load["num_reqs"] == 0:
                return load
            assert time.monotonic() < deadline, f"still busy after {seconds} s: {load}"
            await asyncio.sleep(0.02)


def greedy(text: str | None = None, sampling: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    """A /generate body with temperature 0."""
    body: dict[str, Any] = {"sampling_params": {"temperature": 0, **(sampling or {})}, **fields}
    if text is not None:
        body["text"] = text
    return body


@asynccontextmanager
async def local_server(model: Path, **options: Any) -> AsyncIterator[LocalServer]:
    """A warmed-up server over ``model``; ``options`` are those of ``ServerConfig``."""
    config = ServerConfig(model_path=str(model), **{"device": "cpu", "served_model_name": "chain", **options})
    async with await AsyncEngine.start(config) as engine:
        context = ServerContext(engine)
        server = TestServer(make_app(context))
        await server.start_server(shutdown_timeout=0.1, access_log=None)  # as it is served
        try:
            await warm_up(context)
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
                yield LocalServer(engine, context, server, session)
        finally:
            await server.close()


def resident_bytes() -> int:
    """Memory of this process that is in use: server and client of a ``LocalServer`` share it."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def free_port() -> int:
    """A port that nobody listens on at the moment, and that the system gives to nobody who does not ask for it."""
    chooser = random.SystemRandom()
    while True:
        port = chooser.randrange(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class ServerProcess:
    """``python -m sglang_lite serve`` on a free port. Leaving the context ends it.

    Args:
        arguments: after ``serve``; device, host and port are added.
        log: file for its output.
    """

    def __init__(self, arguments: Iterable[str], log: Path, *, port: int | None = None, device: str = "cpu") -> None:
        self.port = free_port() if port is None else port
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = log
        words = ["serve", *arguments, "--device", device, "--host", "127.0.0.1", "--port", str(self.port)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "sglang_lite", *words], stdout=output, stderr=output, env=environment, cwd=ROOT
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    @property
    def output(self) -> str:
        """What it has printed so far."""
        return self._log.read_text(errors="replace")

    def health(self) -> int | None:
        """Status of /health, None while the connection is refused."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=2) as response:
                status: int = response.status
                return status
        except urllib.error.HTTPError as error:
            return error.code
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return None

    def wait_ready(self, seconds: float = 60.0) -> None:
        """Wait for /health to be 200."""
        deadline = time.monotonic() + seconds
        while self.health() != 200:
            assert self.process.poll() is None, f"the server ended with {self.process.returncode}:\n{self.output}"
            assert time.monotonic() < deadline, f"the server is not ready after {seconds} s:\n{self.output}"
            time.sleep(0.05)

    def wait_exit(self, seconds: float) -> int:
        """Exit code; fails when it takes longer than ``seconds``."""
        return self.process.wait(timeout=seconds)
