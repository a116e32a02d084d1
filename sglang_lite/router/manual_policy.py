"""Sticky routing keys: a key stays at the worker that it was given to."""

from __future__ import annotations

import hashlib
import random
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sglang_lite.router.balance import least_loaded
from sglang_lite.router.prompt import Prompt
from sglang_lite.router.workers import Worker

ASSIGNMENTS = ("random", "min_load", "min_group")
_MOST_KEYS = 262_144


@dataclass(slots=True)
class _Entry:
    used: float
    owner: str
    before: str | None = None


class Manual:
    """The same worker for the same routing key (a request without one is assigned like a new key, and not kept).

    A key whose worker cannot take it moves, and remembers where it was: should the new worker go too, it moves back.
    Keys that nobody used for a while are forgotten; at most 262,144 are kept.

    Args:
        mode: how a new key is assigned: ``random``, ``min_load`` (fewest requests), ``min_group`` (fewest keys).
        idle: seconds after which an unused key is forgotten.
    """

    def __init__(
        self, mode: str, idle: float, generator: random.Random, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._mode = mode
        self._idle = idle
        self._generator = generator
        self._clock = clock
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()  # the one used last is last
        self._groups: Counter[str] = Counter()
        self._turn = 0
        self.reason = ""
        self.overlap: int | None = None

    def __len__(self) -> int:
        return len(self._entries)

    def choose(self, workers: Sequence[Worker], prompt: Prompt) -> Worker:
        """The worker of the prompt's routing key."""
        now = self._clock()
        self._expire(now)
        if not prompt.routing_key:
            self.reason = "no_key"
            return self._assign(workers)
        key = hashlib.blake2b(prompt.routing_key.encode("utf-8", "surrogateescape"), digest_size=16).digest()
        by_name = {worker.name: worker for worker in workers}
        entry = self._entries.get(key)
        if entry is None:
            worker = self._assign(workers)
            self._entries[key] = _Entry(now, worker.name)
            self._groups[worker.name] += 1
            self.reason = "new_key"
            if len(self._entries) > _MOST_KEYS:
                self._drop()
            return worker
        self._entries.move_to_end(key)
        entry.used = now
        self.reason = "sticky"
        if entry.owner not in by_name:
            back = by_name.get(entry.before or "")
            self._move(entry, back.name if back is not None else self._assign(workers).name)
            self.reason = "moved"
        return by_name[entry.owner]

    def sent(self, worker: Worker, prompt: Prompt) -> None:
        """Nothing is noted: keys are assigned when they come."""

    def forget(self, worker: Worker) -> None:
        """Nothing is done at once: its keys move when they are used, or expire."""

    def _assign(self, workers: Sequence[Worker]) -> Worker:
        self._turn += 1
        if self._mode == "random":
            return self._generator.choice(workers)
        if self._mode == "min_load":
            return least_loaded(workers, self._turn)
        fewest = min(self._groups[worker.name] for worker in workers)
        return least_loaded([one for one in workers if self._groups[one.name] == fewest], self._turn)

    def _move(self, entry: _Entry, name: str) -> None:
        self._leave(entry.owner)
        self._groups[name] += 1
        entry.owner, entry.before = name, entry.owner

    def _leave(self, name: str) -> None:
        self._groups[name] -= 1
        if not self._groups[name]:
            del self._groups[name]

    def _expire(self, now: float) -> None:
        while self._entries and next(iter(self._entries.values())).used + self._idle <= now:
            self._drop()

    def _drop(self) -> None:
        """The key that was not used for the longest time goes."""
        _, entry = self._entries.popitem(last=False)
        self._leave(entry.owner)
