"""The router's choice of a worker, without a network: ``python -m benchmarks.router choice``.

8 workers have seen 10,000 prompts of 4,096 token ids (100 beginnings of 2,048, each with 100 ends). Requests repeat
one of them but for its last 16 tokens. ``decision`` is what the proxy does with a parsed body: key, usable workers,
``cache_aware`` policy. ``record`` is what it notes after a good answer.
"""

from __future__ import annotations

import random
from pathlib import Path

from benchmarks.report import publish, time_calls
from sglang_lite.router.body import Head, parse_head
from sglang_lite.router.context import RouterContext
from sglang_lite.router.options import RouterOptions, checked
from sglang_lite.router.prompt import Prompt
from sglang_lite.router.workers import Worker, usable

HEADERS = ("part", "p50 us", "p90 us", "calls")
WORKERS, BEGINNINGS, ENDS, TOKENS = 8, 100, 100, 4096


def router() -> RouterContext:
    """A router whose workers are registered and idle; its tree is large enough for all prompts."""
    urls = tuple(f"http://worker-{number}:1" for number in range(WORKERS))
    context = RouterContext(checked(RouterOptions(worker_urls=urls, max_tree_size=1 << 30)))
    for worker in context.registry.workers.values():
        worker.take_info({"served_model_name": "m", "disaggregation_mode": "null"})
    return context


def choose(context: RouterContext, head: Head) -> Worker:
    """The proxy's steps for a first attempt."""
    workers = context.registry.of_model(head.model_name)
    regular = [worker for worker in workers if worker.role == "regular"]
    ready = usable(regular, context.now, "no_healthy_workers")
    return context.policies["regular"].choose(ready, Prompt(head.key))


def prompts(generator: random.Random) -> list[list[str]]:
    """Token ids as text, of 10,000 prompts."""

    def ids(count: int) -> list[str]:
        return [str(number) for number in generator.choices(range(128_000), k=count)]

    beginnings = [ids(TOKENS // 2) for _ in range(BEGINNINGS)]
    ends = [ids(TOKENS // 2) for _ in range(ENDS)]
    return [beginning + end for beginning in beginnings for end in ends]


def body(ids: list[str]) -> bytes:
    """A request of ``/generate``."""
    return f'{{"model":"m","input_ids":[{",".join(ids)}],"sampling_params":{{"max_new_tokens":8}}}}'.encode()


def measure(calls: int, json_path: Path | None) -> None:
    """Print and write the table."""
    generator, context = random.Random(0), router()
    workers, policy = list(context.registry.workers.values()), context.policies["regular"]
    cached = prompts(generator)
    owners = [workers[number % WORKERS] for number in range(len(cached))]
    for ids, owner in zip(cached, owners, strict=True):
        policy.sent(owner, Prompt(parse_head(body(ids)).key))
    picks = generator.choices(range(len(cached)), k=calls)
    bodies = [body([*cached[pick][:-16], *("7" * 16)]) for pick in picks]
    heads = [parse_head(data) for data in bodies]
    hits = sum(choose(context, head) is owners[pick] for head, pick in zip(heads, picks, strict=True))
    timings = {
        "parse": time_calls(parse_head, bodies),
        "decision": time_calls(lambda head: choose(context, head), heads),
        "parse + decision": time_calls(lambda data: choose(context, parse_head(data)), bodies),
        "record": time_calls(lambda head: policy.sent(workers[0], Prompt(head.key)), heads),
    }
    rows = [(part, timing.median_us, timing.p90_us, timing.count) for part, timing in timings.items()]
    publish("router-choice", HEADERS, rows, json_path=json_path, extra={"hit_rate": hits / len(picks)})
    print(f"the worker that has the prompt was chosen in {hits} of {len(picks)} requests")
