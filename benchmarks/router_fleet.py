"""Null workers, and routers in front of them, as processes: what ``benchmarks.router`` measures.

A worker computes nothing. It answers at once, streams a token a tick, or waits as long as a server would compute what
its (simulated) prefix cache does not hold. ``python -m benchmarks.router_fleet SECONDS_A_TICK BLOCKS`` starts one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil
import uvloop
from aiohttp import web

ROOT = Path(__file__).parents[1]
BLOCK = 64
"""Characters of a block of the simulated cache."""
SECONDS_A_CHARACTER = 2e-6
SECONDS_AT_LEAST = 2e-3
_EVENT = (
    b'data: {"id":"cmpl-1","object":"text_completion","created":1,"model":"m","choices":[{"index":0,"text":" tok",'
    b'"logprobs":null,"finish_reason":null,"matched_stop":null}],"usage":null}\n\n'
)
_ANSWER = (
    b'{"text":" tok","output_ids":[1],"meta_info":{"id":"1","finish_reason":{"type":"length","length":1},'
    b'"prompt_tokens":4,"completion_tokens":1,"cached_tokens":0}}'
)


class PrefixBlocks:
    """A prefix cache of a bounded number of blocks, the least recently used go first."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._blocks: OrderedDict[int, None] = OrderedDict()
        self.asked = 0
        self.found = 0

    def take(self, text: str) -> int:
        """Note a prompt; returns the characters of it that were not there."""
        name, hits, whole = 0, 0, True
        for start in range(0, len(text) - BLOCK + 1, BLOCK):
            name = hash((name, text[start : start + BLOCK]))
            if name in self._blocks:
                hits += whole
                self._blocks.move_to_end(name)
            else:
                whole = False
                self._blocks[name] = None
        while len(self._blocks) > self._capacity:
            self._blocks.popitem(last=False)
        self.asked += len(text)
        self.found += hits * BLOCK
        return len(text) - hits * BLOCK


def worker_app(tick: float, capacity: int) -> web.Application:
    """A null worker."""
    cache = PrefixBlocks(capacity)
    now: list[asyncio.Event] = [asyncio.Event()]

    async def generate(request: web.Request) -> web.StreamResponse:
        body = msgspec.json.decode(await request.read())
        if body.get("stream"):
            response = web.StreamResponse(headers={"content-type": "text/event-stream"})
            await response.prepare(request)
            for _ in range(body["sampling_params"]["max_new_tokens"]):
                await now[0].wait()
                await response.write(_EVENT)
            await response.write(b"data: [DONE]\n\n")
            return response
        if capacity:
            missing = cache.take(body["text"])
            await asyncio.sleep(SECONDS_AT_LEAST + missing * SECONDS_A_CHARACTER)
        return web.Response(body=_ANSWER, content_type="application/json")

    async def count(request: web.Request) -> web.Response:
        return web.json_response({"asked": cache.asked, "found": cache.found})

    async def info(request: web.Request) -> web.Response:
        return web.json_response({"served_model_name": "m", "model_path": "m", "disaggregation_mode": "null"})

    async def ticking(app: web.Application) -> Any:
        async def run() -> None:
            while True:
                await asyncio.sleep(tick)
                event, now[0] = now[0], asyncio.Event()
                event.set()

        task = asyncio.create_task(run())
        yield
        task.cancel()

    app = web.Application(client_max_size=1 << 30)
    app.cleanup_ctx.append(ticking)
    app.router.add_post("/generate", generate)
    for path in ("/server_info", "/model_info"):
        app.router.add_get(path, info)
    app.router.add_get("/health", count)
    return app


async def _serve(tick: float, capacity: int) -> None:
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)  # SGLang's router tries gRPC at each worker
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    runner = web.AppRunner(worker_app(tick, capacity), access_log=None, shutdown_timeout=0.2)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
    print(runner.addresses[0][1], flush=True)
    await stop.wait()
    await runner.cleanup()


@contextlib.contextmanager
def workers(count: int, *, tick: float = 0.01, capacity: int = 0) -> Iterator[list[str]]:
    """Addresses of ``count`` null workers."""
    command = [sys.executable, "-m", "benchmarks.router_fleet", str(tick), str(capacity)]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) for _ in range(count)]
    try:
        yield [f"http://127.0.0.1:{int((process.stdout or sys.stdin.buffer).readline())}" for process in started]
    finally:
        for process in started:
            process.terminate()
        for process in started:
            process.wait()


def rust_router() -> str | None:
    """SGLang's router, where it is installed: ``SGLANG_ROUTER`` names it, else the path is searched."""
    return os.environ.get("SGLANG_ROUTER") or shutil.which("sglang-router")


class RouterProcess:
    """A running router.

    Attributes:
        name: ``ours`` or ``rust``.
        url: where it listens.
    """

    def __init__(self, name: str, urls: Sequence[str], *more: str) -> None:
        self.name = name
        port, self._expected = _free_port(), len(urls)
        self.url = f"http://127.0.0.1:{port}"
        words = ["--host", "127.0.0.1", "--port", str(port), "--policy", "cache_aware", "--worker-urls", *urls]
        words += ["--worker-startup-check-interval", "1", *more]
        if name == "ours":
            command = [sys.executable, "-m", "sglang_lite", "router", *words, "--log-level", "warn"]
        else:
            program = rust_router()
            assert program is not None
            command = [program, "launch", *words, "--log-level", "error", "--prometheus-port", str(_free_port())]
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        self._wait_ready()

    def __enter__(self) -> RouterProcess:
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def processor_seconds(self) -> float:
        """Time that it and its children have computed."""
        parent = psutil.Process(self._process.pid)
        times = [process.cpu_times() for process in (parent, *parent.children(recursive=True))]
        return sum(time.user + time.system for time in times)

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(self.url + "/workers", timeout=2) as reply:
                found = msgspec.json.decode(reply.read())["workers"]
                if sum(worker["is_healthy"] for worker in found) == self._expected:
                    return
            if time.monotonic() > deadline or self._process.poll() is not None:
                raise SystemExit(f"the router {self.name} did not start")
            time.sleep(0.1)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(float(sys.argv[1]), int(sys.argv[2])))
