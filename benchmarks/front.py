"""The HTTP front without a model: ``python -m benchmarks.front``.

Three loads on each of two servers, one after the other on the same machine (``benchmarks.front_servers``): unary
completions of one token over connections that stay open; streams as fast as they come; and streams paced by a step of
a fixed time, in which every token is an event of its own. Processor time is that of the front process alone. ``ours``
validates, tokenizes, detokenizes, looks for stops and talks to its engine core; ``plain`` is aiohttp with
``json.dumps`` and does nothing else: it is the floor of this way of serving, not a competitor.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.report import add_json_argument, publish

HEADERS = ("front", "load", "clients", "requests/s", "tokens/s", "tokens/event", "cpu us/request", "cpu us/token")

PROMPT = "A quick question whose answer is BCDA"


@dataclass(frozen=True, slots=True)
class Server:
    """A running server: its port and its front process."""

    port: int
    process: psutil.Process

    def cpu(self) -> float:
        """Processor seconds of the front so far."""
        times = self.process.cpu_times()
        return float(times.user + times.system)


@asynccontextmanager
async def running(kind: str, milliseconds: str) -> AsyncIterator[Server]:
    """A server of ``kind`` in a process of its own."""
    command = (sys.executable, "-m", "benchmarks.front_servers", kind, milliseconds)
    root = Path(__file__).parents[1]
    process = await asyncio.create_subprocess_exec(*command, cwd=root, stdout=asyncio.subprocess.PIPE)
    try:
        if process.stdout is None:
            raise RuntimeError("the server has no output")
        line = await process.stdout.readline()
        if not line:
            raise RuntimeError(f"the server {kind} ended before it was ready")
        yield Server(int(line), psutil.Process(process.pid))
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        await process.wait()


def request_bytes(*, tokens: int, stream: bool, close: bool) -> bytes:
    """One completion request."""
    body = {"model": "chain", "prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    data = json.dumps({**body, "stream": stream}).encode()
    connection = "close" if close else "keep-alive"
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Connection: {connection}\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


async def unary_client(port: int, request: bytes, count: int) -> None:
    """``count`` requests over one connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for _ in range(count):
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(head.decode())
        length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        await reader.readexactly(int(length.partition(b":")[2]))
    writer.close()
    await writer.wait_closed()


async def stream_client(port: int, request: bytes) -> int:
    """One stream to its end; the number of its events. Nothing is parsed, so that the client costs little."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    body = await reader.read(-1)
    writer.close()
    if not body.startswith(b"HTTP/1.1 200") or b"data: [DONE]\n\n" not in body:
        raise RuntimeError(body[:300].decode())
    return body.count(b"data: {")


async def measure_unary(kind: str, server: Server, clients: int, requests: int) -> tuple[object, ...]:
    """A row: unary requests."""
    request = request_bytes(tokens=1, stream=False, close=False)
    await unary_client(server.port, request, 50)
    each = max(1, requests // clients)
    started, cpu = time.perf_counter(), server.cpu()
    await asyncio.gather(*(unary_client(server.port, request, each) for _ in range(clients)))
    seconds, cpu, done = time.perf_counter() - started, server.cpu() - cpu, each * clients
    return (kind, "unary", clients, round(done / seconds), round(done / seconds), "-", round(cpu / done * 1e6, 1), "-")


async def measure_streams(kind: str, load: str, server: Server, clients: int, tokens: int) -> tuple[object, ...]:
    """A row: ``clients`` streams at once."""
    request = request_bytes(tokens=tokens, stream=True, close=True)
    await stream_client(server.port, request_bytes(tokens=8, stream=True, close=True))
    started, cpu = time.perf_counter(), server.cpu()
    events = sum(await asyncio.gather(*(stream_client(server.port, request) for _ in range(clients))))
    seconds, cpu, total = time.perf_counter() - started, server.cpu() - cpu, tokens * clients
    return (
        kind, load, clients, round(clients / seconds, 1), round(total / seconds), round(total / events, 2), "-",
        round(cpu / total * 1e6, 1),
    )  # fmt: skip


async def run(arguments: argparse.Namespace) -> None:
    """Measure both servers and publish the table."""
    rows: list[tuple[object, ...]] = []
    for kind in ("ours", "plain"):
        async with running(kind, "0") as server:
            rows.append(await measure_unary(kind, server, arguments.clients, arguments.requests))
            rows.append(await measure_streams(kind, "streams", server, arguments.clients, arguments.tokens))
        async with running(kind, str(arguments.step_ms)) as server:
            load = f"streams, {arguments.step_ms:g} ms a step"
            rows.append(await measure_streams(kind, load, server, arguments.clients, arguments.tokens))
    publish("front", HEADERS, rows, json_path=arguments.json, extra={"tokens": arguments.tokens})


def main() -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--requests", type=int, default=6400, help="unary requests of all clients together")
    parser.add_argument("--tokens", type=int, default=400, help="output tokens of a stream")
    parser.add_argument("--step-ms", type=float, default=25.0, help="time of a step of the paced streams")
    add_json_argument(parser)
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
