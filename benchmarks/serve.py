"""Throughput and latency of a server over HTTP: ``python -m benchmarks.serve``.

Starts ``sglang-lite serve`` with the demo model on this machine's CPU (or uses a running server with ``--url``) and
sends streaming completions of random token ids with a fixed number of output tokens:

  W1   1 client,   128 in,  64 out: the latency of one user
  W2  16 clients,  256 in,  64 out
  W3  16 clients,  1,024 shared tokens and 32 of their own in, 32 out: the prefix cache
  W4  64 clients,  64 in,  32 out

Output tokens are those of the server's usage; times are those at which events arrive. ``--rounds`` repeats every
workload with fresh prompts and keeps the round with the median throughput.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import msgspec

from benchmarks.report import add_json_argument, publish

LOWEST_ID, HIGHEST_ID = 1000, 40_000
START_SECONDS = 180.0

HEADERS = (
    "workload", "clients", "in", "shared", "out", "requests",
    "out tok/s", "req/s", "ttft p50 ms", "ttft p99 ms", "itl p50 ms", "itl p99 ms", "cached",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Workload:
    """Closed-loop load: every client sends its next request when the last one has ended.

    Attributes:
        shared, own, output: tokens of the common prefix, of the rest of each prompt, and of each answer.
    """

    name: str
    clients: int
    requests: int
    shared: int
    own: int
    output: int


WORKLOADS = (
    Workload("W1", 1, 8, 0, 128, 64),
    Workload("W2", 16, 48, 0, 256, 64),
    Workload("W3", 16, 64, 1024, 32, 32),
    Workload("W4", 64, 128, 0, 64, 32),
)


@dataclass(slots=True)
class Measured:
    """One request: seconds at which it was sent and at which its text events came."""

    sent: float
    events: list[float] = field(default_factory=list)
    output_tokens: int = 0
    cached_tokens: int = 0


async def complete(session: aiohttp.ClientSession, url: str, model: str, ids: list[int], output: int) -> Measured:
    """Send one streaming completion and read it to the end."""
    body = {
        "model": model,
        "prompt": ids,
        "max_tokens": output,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    result = Measured(time.perf_counter())
    async with session.post(f"{url}/v1/completions", json=body) as response:
        if response.status != 200:
            raise RuntimeError(f"{url} answered {response.status}: {(await response.text())[:300]}")
        async for line in response.content:
            data = line.removeprefix(b"data: ").strip()
            if data in (b"", b"[DONE]"):
                continue
            event = msgspec.json.decode(data)
            if "error" in event:
                raise RuntimeError(f"the stream failed: {event['error']}")
            if event["choices"]:
                result.events.append(time.perf_counter())
            elif event.get("usage"):
                usage = event["usage"]
                result.output_tokens = usage["completion_tokens"]
                result.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return result


async def run_round(url: str, model: str, load: Workload, prompts: list[list[int]]) -> tuple[list[Measured], float]:
    """Send all prompts from ``load.clients`` clients; the measurements and the seconds it took."""
    queue = list(reversed(prompts))
    results: list[Measured] = []
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as session:

        async def client() -> None:
            while queue:
                results.append(await complete(session, url, model, queue.pop(), load.output))

        started = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(load.clients)))
        return results, time.perf_counter() - started


def make_prompts(load: Workload, generator: random.Random) -> list[list[int]]:
    """Fresh prompts; the first one is for the warm-up and brings the shared prefix into the cache."""

    def ids(count: int) -> list[int]:
        return [generator.randrange(LOWEST_ID, HIGHEST_ID) for _ in range(count)]

    shared = ids(load.shared)
    return [shared + ids(load.own) for _ in range(load.requests + 1)]


def percentile(values: Sequence[float], share: float) -> float:
    """In milliseconds; 0 without values."""
    ordered = sorted(values)
    return round(ordered[min(len(ordered) - 1, int(len(ordered) * share))] * 1e3, 2) if ordered else 0.0


def summarize(load: Workload, results: list[Measured], seconds: float) -> tuple[object, ...]:
    """One row of the table."""
    first = [result.events[0] - result.sent for result in results]
    gaps = [late - early for result in results for early, late in zip(result.events, result.events[1:], strict=False)]
    tokens = sum(result.output_tokens for result in results)
    cached = statistics.mean(result.cached_tokens for result in results)
    return (
        load.name, load.clients, load.shared + load.own, load.shared, load.output, len(results),
        round(tokens / seconds, 1), round(len(results) / seconds, 2),
        percentile(first, 0.5), percentile(first, 0.99), percentile(gaps, 0.5), percentile(gaps, 0.99), round(cached),
    )  # fmt: skip


async def measure(url: str, model: str, load: Workload, *, rounds: int, seed: int) -> tuple[object, ...]:
    """The row of the round with the median throughput."""
    generator = random.Random(f"{load.name} {seed}")
    rows = []
    for _ in range(rounds):
        warm, *prompts = make_prompts(load, generator)
        await run_round(url, model, Workload(load.name, 1, 1, 0, 0, load.output), [warm])
        rows.append(summarize(load, *await run_round(url, model, load, prompts)))
    column = HEADERS.index("out tok/s")
    return sorted(rows, key=lambda row: float(str(row[column])))[len(rows) // 2]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@asynccontextmanager
async def running_server(model_path: str, options: Sequence[str]) -> AsyncIterator[tuple[str, float]]:
    """A server process of our own; yields its address and the seconds until it was ready."""
    port = _free_port()
    words = ["serve", "--model-path", model_path, "--device", "cpu", "--port", str(port), *options]
    started = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", "sglang_lite", *words], cwd=Path(__file__).parents[1])
    url = f"http://127.0.0.1:{port}"
    try:
        async with aiohttp.ClientSession() as session:
            while not await _is_healthy(session, url):
                if process.poll() is not None:
                    raise RuntimeError(f"the server ended with {process.returncode} before it was ready")
                if time.perf_counter() - started > START_SECONDS:
                    raise RuntimeError(f"the server was not ready after {START_SECONDS:g} s")
                await asyncio.sleep(0.05)
        yield url, time.perf_counter() - started
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.wait()


async def _is_healthy(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(f"{url}/health") as response:
            return response.status == 200
    except aiohttp.ClientConnectionError:
        return False


async def run(arguments: argparse.Namespace) -> None:
    """Measure every chosen workload and publish the table."""
    chosen = [load for load in WORKLOADS if load.name in arguments.workloads]
    extra: dict[str, object] = {"rounds": arguments.rounds, "model": arguments.model}
    if arguments.url:
        rows = await _measure_all(arguments.url.rstrip("/"), chosen, arguments)
    else:
        async with running_server(arguments.model, arguments.server_options) as (url, ready_seconds):
            extra["ready_seconds"] = round(ready_seconds, 2)
            print(f"ready after {ready_seconds:.1f} s", flush=True)
            rows = await _measure_all(url, chosen, arguments)
    publish("serve", HEADERS, rows, json_path=arguments.json, extra=extra)


async def _measure_all(url: str, chosen: Sequence[Workload], arguments: argparse.Namespace) -> list[tuple[object, ...]]:
    model = arguments.served_model_name
    return [await measure(url, model, load, rounds=arguments.rounds, seed=arguments.seed) for load in chosen]


def main() -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="a running server; default: start one")
    parser.add_argument("--model", default="demo", help="model path of the server to start")
    parser.add_argument("--served-model-name", default="default", help="name to put into requests")
    parser.add_argument("--workloads", nargs="+", default=[load.name for load in WORKLOADS], metavar="NAME")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seed", type=int, default=os.getpid(), help="fresh prompts by default")
    parser.add_argument("server_options", nargs="*", help="after --: options of the server to start")
    add_json_argument(parser)
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
