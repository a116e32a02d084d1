"""How one of several workers is chosen. No I/O; what is random comes from a generator that is handed in."""

from __future__ import annotations

import bisect
import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from sglang_lite.router.balance import by_beginning, least_loaded, out_of_balance
from sglang_lite.router.bucket_policy import Bucket
from sglang_lite.router.kv_events import KVEvents
from sglang_lite.router.manual_policy import Manual
from sglang_lite.router.prefix_tree import PrefixTree
from sglang_lite.router.prompt import Prompt
from sglang_lite.router.workers import Worker


@dataclass(frozen=True, slots=True)
class PolicyLimits:
    """Settings of the policies.

    Attributes:
        match: share of a prompt that must be known for its workers to be preferred.
        absolute, relative: loads are out of balance when max - min and max / min are above these.
        tree_bytes: size of a prefix tree.
        bucket_seconds: time between two looks at the lengths of requests.
        by_beginning: several processes choose, so prompts that one does not know go by how they begin.
        assignment, idle_seconds: how new routing keys are assigned, and when unused ones are forgotten.
    """

    match: float = 0.5
    absolute: int = 32
    relative: float = 1.1
    tree_bytes: int = 64 << 20
    bucket_seconds: float = 5.0
    assignment: str = "random"
    idle_seconds: float = 14400.0
    by_beginning: bool = False


class Policy(Protocol):
    """Chooses among at least one worker.

    Attributes:
        reason: why the last choice was made, in a word.
        overlap: blocks of the last prompt that its worker is known to hold; None where that is not known exactly.
    """

    reason: str
    overlap: int | None

    def choose(self, workers: Sequence[Worker], prompt: Prompt) -> Worker: ...

    def sent(self, worker: Worker, prompt: Prompt) -> None:
        """``worker`` gets the request now."""

    def forget(self, worker: Worker) -> None:
        """``worker`` is gone."""


class _Stateless:
    reason = "spread"
    overlap: int | None = None

    def sent(self, worker: Worker, prompt: Prompt) -> None:
        del worker, prompt

    def forget(self, worker: Worker) -> None:
        del worker


class RoundRobin(_Stateless):
    """One after the other."""

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, workers: Sequence[Worker], prompt: Prompt) -> Worker:
        del prompt
        self._turn += 1
        return workers[(self._turn - 1) % len(workers)]


class Random(_Stateless):
    """Any."""

    def __init__(self, generator: random.Random) -> None:
        self._generator = generator

    def choose(self, workers: Sequence[Worker], prompt: Prompt) -> Worker:
        del prompt
        return self._generator.choice(workers)


class PowerOfTwo(_Stateless):
    """The less loaded of two at random."""

    def __init__(self, generator: random.Random) -> None:
        self._generator = generator

    def choose(self, workers: Sequence[Worker], prompt: Prompt) -> Worker:
        del prompt
        if len(workers) == 1:
            return workers[0]
        first, second = self._generator.sample(workers, 2)
        return first if first.load <= second.load else second


class ConsistentHashing(_Stateless):
    """The same worker for the same routing key, else for the same beginning of the prompt; a worker that leaves
    moves only its own keys."""

    _POINTS = 64
    _BEGINNING = 1024

    def __init__(self) -> None:
        self._urls: tuple[str, ...] = ()
        self._points: list[int] = []
        self._owners: list[str] = []

    def choose(self, workers: Sequence[Worker], prompt: Prompt) -> Worker:
        by_url = {worker.name: worker for worker in workers}
        urls = tuple(by_url)
        if urls != self._urls:
            ring = sorted((_point(f"{url}#{number}".encode()), url) for url in urls for number in range(self._POINTS))
            self._points, self._owners = [point for point, _ in ring], [url for _, url in ring]
            self._urls = urls
        key = (
            prompt.routing_key.encode("utf-8", "surrogateescape")
            if prompt.routing_key
            else prompt.key[: self._BEGINNING]
        )
        wanted = _point(key)
        place = bisect.bisect(self._points, wanted) % len(self._points)
        return by_url[self._owners[place]]


class CacheAware:
    """The worker that has most of the prompt in its cache, unless loads are out of balance.

    What workers publish as KV events is believed; for those that publish nothing, for gaps in what they publish, and
    for prompts whose tokens are not known, a tree of what they were sent is a guess.
    """

    def __init__(self, limits: PolicyLimits) -> None:
        self._limits = limits
        self._tree = PrefixTree(limits.tree_bytes)
        self._turn = 0
        self.events: KVEvents | None = None
        self.reason = ""
        self.overlap: int | None = None

    def choose(self, workers: Sequence[Worker], prompt: Prompt) -> Worker:
        limits, events = self._limits, self.events
        self._turn += 1
        self.overlap = None
        if out_of_balance(workers, limits.absolute, limits.relative):
            self.reason = "balance"
            return least_loaded(workers, self._turn)
        holding = None if events is None else events.match(workers, prompt)
        if events is None or holding is None:
            share, matching = self._guess(workers, prompt.key)
        else:
            share, matching = holding.share, holding.workers
            unknown = [worker for worker in workers if not events.is_complete(worker)]
            if unknown and (guess := self._guess(unknown, prompt.key))[0] > share:
                share, matching = guess
        self.reason = "match" if share > limits.match else "load"
        if share > limits.match:
            worker = least_loaded(matching, self._turn)
        elif limits.by_beginning and prompt.key:
            worker = by_beginning(workers, prompt.key, limits.absolute // 8, self._turn)
        else:
            worker = least_loaded(workers, self._turn)
        if events is not None and holding is not None:
            known = holding if worker in holding.workers or not holding.blocks else events.match([worker], prompt)
            self.overlap = 0 if known is None else known.blocks
        return worker

    def sent(self, worker: Worker, prompt: Prompt) -> None:
        if self.events is None or prompt.tokens is None or not self.events.is_complete(worker):
            self._tree.insert(prompt.key, worker.index)

    def forget(self, worker: Worker) -> None:
        self._tree.remove_worker(worker.index)

    def _guess(self, workers: Sequence[Worker], key: bytes) -> tuple[float, Sequence[Worker]]:
        """The share of ``key`` that some of ``workers`` were sent before, and who."""
        bits = 0
        for worker in workers:
            bits |= 1 << worker.index
        length, holders = self._tree.match(key, bits)
        if not length:
            return 0.0, ()
        return length / len(key), [worker for worker in workers if holders >> worker.index & 1]


POLICIES: dict[str, Callable[[PolicyLimits, random.Random], Policy]] = {
    "bucket": lambda limits, generator: Bucket(limits.bucket_seconds, limits.absolute, limits.relative, generator),
    "cache_aware": lambda limits, generator: CacheAware(limits),
    "consistent_hashing": lambda limits, generator: ConsistentHashing(),
    "manual": lambda limits, generator: Manual(limits.assignment, limits.idle_seconds, generator),
    "power_of_two": lambda limits, generator: PowerOfTwo(generator),
    "random": lambda limits, generator: Random(generator),
    "round_robin": lambda limits, generator: RoundRobin(),
}
GENERAL = tuple(name for name in POLICIES if name != "bucket")
"""Policies of any pool; ``bucket`` is for prefill, where the length of a prompt is the work."""


def _point(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")
