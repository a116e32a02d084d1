"""The router beside SGLang's own, in one run: ``python -m benchmarks.router [choice] [proxy] [cache] [processes]``.

``choice`` is the decision alone, without a network (``router_choice``). The others put null workers behind a router
(``router_fleet``) and count the processor time that the router's own processes take, so that clients and workers on
the same cores do not blur it: ``per core`` is units a second of that time. ``SGLANG_ROUTER`` names SGLang's router;
without it ours is alone.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmarks import router_choice, router_scaling
from benchmarks.report import add_json_argument, publish
from benchmarks.router_fleet import BLOCK, RouterProcess, rust_router, workers
from benchmarks.router_load import Cost, conversations, hit_rate, streamed, unary

PARTS = ("choice", "proxy", "cache", "processes")
COST = ("router", "work", "per core", "per second", "us a unit", "runs")
GROUPS, USERS, TURNS = 24, 4, 3


def names() -> Sequence[str]:
    """The routers that can be measured."""
    return ("ours", "rust") if rust_router() else ("ours",)


def row(name: str, work: str, costs: Sequence[Cost]) -> tuple[object, ...]:
    """The median of several runs."""
    core = statistics.median(cost.per_core for cost in costs)
    return name, work, round(core), round(statistics.median(cost.per_second for cost in costs)), 1e6 / core, len(costs)


async def compare(urls: Sequence[str], runs: int, requests: int, more: Sequence[str] = ()) -> list[tuple[object, ...]]:
    """Unary requests and streams, the routers in turn."""
    found: dict[tuple[str, str], list[Cost]] = {}
    for _ in range(runs):
        for name in names():
            with RouterProcess(name, urls, *(more if name == "ours" else ())) as router:
                short = await unary(router, requests, 32, 40)
                long = await unary(router, requests, 32, 16384)
                tokens = await streamed(router, 64, 128)
            for work, cost in (("unary, 40 characters", short), ("unary, 16 KiB", long), ("streamed tokens", tokens)):
                found.setdefault((name, work), []).append(cost)
    return [row(name, work, costs) for (name, work), costs in sorted(found.items(), key=lambda item: item[0][1])]


def proxy(runs: int, requests: int, json_path: Path | None) -> None:
    """What passing requests on costs."""
    with workers(2) as urls:
        rows = asyncio.run(compare(urls, runs, requests))
    publish("router-proxy", COST, rows, json_path=json_path)


def cache(runs: int, json_path: Path | None) -> None:
    """Prompt characters that were found in the caches of four workers, which together hold about all of them."""
    per_worker = GROUPS * (4096 + USERS * TURNS * 512) // BLOCK // 3
    rows: list[tuple[object, ...]] = []
    for seed in range(runs):
        talks = conversations(seed, GROUPS, USERS, TURNS)
        for name in (*names(), "ours, 2 processes"):
            more = ("--workers", "2") if "processes" in name else ()
            with workers(4, capacity=per_worker) as urls, RouterProcess(name.split(",")[0], urls, *more) as router:
                rows.append((name, seed, 100 * asyncio.run(hit_rate(router, urls, talks, 16))))
    publish("router-cache", ("router", "seed", "characters found %"), sorted(rows), json_path=json_path)


def processes(runs: int, requests: int, json_path: Path | None) -> None:
    """As many processes of ours on one port as there are cores."""
    rows = router_scaling.measure(runs, requests)
    publish("router-processes", router_scaling.COLUMNS, rows, json_path=json_path)


def main() -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="what to measure (default: all)")
    parser.add_argument("--calls", type=int, default=2000, help="choices")
    parser.add_argument("--requests", type=int, default=1500, help="unary requests a run")
    parser.add_argument("--runs", type=int, default=3)
    add_json_argument(parser)
    arguments = parser.parse_args()
    for part in arguments.parts or PARTS:
        if part == "choice":
            router_choice.measure(arguments.calls, arguments.json)
        elif part == "proxy":
            proxy(arguments.runs, arguments.requests, arguments.json)
        elif part == "cache":
            cache(arguments.runs, arguments.json)
        else:
            processes(arguments.runs, arguments.requests, arguments.json)


if __name__ == "__main__":
    main()
