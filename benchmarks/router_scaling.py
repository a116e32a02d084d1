"""What several router processes pass on, where clients and workers take next to nothing of the cores.

Both are bare protocols over fixed bytes (some 30 us a request together, a twentieth of what the router takes), in one
process: what is left of the machine is the router's.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import statistics
import threading
from collections.abc import Iterator
from typing import Any

import uvloop

from benchmarks.router_fleet import RouterProcess

CONNECTIONS = 64
COLUMNS = ("processes", "requests/s", "times one", "router us a request", "cores of the router", "clients us a request")
_ANSWER = b'{"text":" tok","output_ids":[1],"meta_info":{"id":"1","finish_reason":{"type":"length","length":1}}}'
_INFO = b'{"served_model_name":"m","model_path":"m","disaggregation_mode":"null"}'
_BODY = b'{"text":"0000000000000000000000000000000000000000","sampling_params":{"max_new_tokens":1}}'
_LENGTH = b"content-length:"


def _message(head: bytes, body: bytes) -> bytes:
    return head + b"\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body


def _end_of_message(data: bytes) -> int:
    """Where the first message of ``data`` ends, or 0 while it is not whole."""
    head = data.find(b"\r\n\r\n")
    if head < 0:
        return 0
    lower = data[:head].lower()
    at = lower.find(_LENGTH)
    length = int(lower[at + len(_LENGTH) :].split(b"\r\n", 1)[0]) if at >= 0 else 0
    end = head + 4 + length
    return end if len(data) >= end else 0


class _Messages(asyncio.Protocol):
    """Cuts what comes into messages."""

    def __init__(self) -> None:
        self._data = b""
        self.transport: Any = None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self._data += data
        while end := _end_of_message(self._data):
            message, self._data = self._data[:end], self._data[end:]
            self.received(message)

    def received(self, message: bytes) -> None:
        raise NotImplementedError


class _Worker(_Messages):
    """Says that one token was generated."""

    _answer = _message(b"HTTP/1.1 200 OK", _ANSWER)
    _info = _message(b"HTTP/1.1 200 OK", _INFO)

    def received(self, message: bytes) -> None:
        self.transport.write(self._answer if message.startswith(b"POST /generate") else self._info)


class _Client(_Messages):
    """Asks again as soon as it has an answer, until nothing is left to ask."""

    _request = _message(b"POST /generate HTTP/1.1\r\nhost: router", _BODY)

    def __init__(self, left: Iterator[int]) -> None:
        super().__init__()
        self._left = left
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def ask(self) -> None:
        if next(self._left, None) is None:
            self.done.set_result(None)
        else:
            self.transport.write(self._request)

    def received(self, message: bytes) -> None:
        if not message.startswith(b"HTTP/1.1 200"):
            self.done.set_exception(RuntimeError(f"the router answered {message[:200]!r}"))
        else:
            self.ask()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(ConnectionError(f"the router closed a connection: {exc}"))


async def _ask(port: int, requests: int) -> None:
    """``requests`` over ``CONNECTIONS`` connections."""
    left = iter(range(requests))
    loop = asyncio.get_running_loop()
    clients = [(await loop.create_connection(lambda: _Client(left), "127.0.0.1", port))[1] for _ in range(CONNECTIONS)]
    for client in clients:
        client.ask()
    await asyncio.gather(*(client.done for client in clients))
    for client in clients:
        client.transport.close()


@contextlib.contextmanager
def bare_workers(count: int) -> Iterator[list[str]]:
    """Addresses of ``count`` workers in a thread of this process."""
    ports: list[int] = []
    started, end = threading.Event(), threading.Event()

    async def serve() -> None:
        loop = asyncio.get_running_loop()
        servers = [await loop.create_server(_Worker, "127.0.0.1", 0, backlog=4096) for _ in range(count)]
        ports.extend(server.sockets[0].getsockname()[1] for server in servers)
        started.set()
        await loop.run_in_executor(None, end.wait)
        for server in servers:
            server.close()

    def run() -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    started.wait()
    try:
        yield [f"http://127.0.0.1:{port}" for port in ports]
    finally:
        end.set()
        thread.join()


def measure(runs: int, requests: int, most: int | None = None) -> list[tuple[object, ...]]:
    """A row for each number of router processes, up to the cores; the runs of all take turns."""
    counts = range(1, (most or os.cpu_count() or 1) + 1)
    found: dict[int, list[tuple[float, float, float]]] = {count: [] for count in counts}
    with bare_workers(2) as urls, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        loop = runner.get_loop()
        for _ in range(runs):
            for count in counts:
                with RouterProcess("ours", urls, "--workers", str(count)) as router:
                    port = int(router.url.rpartition(":")[2])
                    runner.run(_ask(port, CONNECTIONS * 4))
                    before, own, started = router.processor_seconds(), _own_seconds(), loop.time()
                    runner.run(_ask(port, requests))
                    wall = loop.time() - started
                    found[count].append((wall, router.processor_seconds() - before, _own_seconds() - own))
    one = statistics.median(wall for wall, _, _ in found[1])
    rows: list[tuple[object, ...]] = []
    for count, costs in found.items():
        wall, processor, own = (statistics.median(column) for column in zip(*costs, strict=True))
        each = 1e6 / requests  # microseconds of a request in a second of all
        rows.append((count, round(requests / wall), one / wall, processor * each, processor / wall, own * each))
    return rows


def _own_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
