"""Requests sorted by length: each worker gets a range of lengths, so that short ones do not wait behind long ones."""

from __future__ import annotations

import bisect
import itertools
import random
import time
from collections import deque
from collections.abc import Callable, Sequence

from sglang_lite.router.balance import least_loaded, out_of_balance
from sglang_lite.router.prompt import Prompt
from sglang_lite.router.workers import Worker

_WINDOW = 4096


class Bucket:
    """Ranges of lengths with equal shares of the work.

    The boundaries are quantiles of the work (the sum of lengths) in the last requests, drawn anew every few seconds;
    before the first time, and when loads are out of balance, the least loaded worker is taken.

    Args:
        seconds: between two adjustments.
        absolute, relative: loads are out of balance when max - min and max / min are above these.
    """

    def __init__(
        self,
        seconds: float,
        absolute: int,
        relative: float,
        generator: random.Random,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._generator = generator
        self._seconds = seconds
        self._absolute = absolute
        self._relative = relative
        self._clock = clock
        self._due = clock() + seconds
        self._lengths: deque[int] = deque(maxlen=_WINDOW)
        self._sorted: list[int] = []
        self._work: list[int] = [0]
        self._turn = 0
        self.reason = ""
        self.overlap: int | None = None

    def choose(self, workers: Sequence[Worker], prompt: Prompt) -> Worker:
        """The worker of the range that the prompt's length (bytes) is in."""
        length = len(prompt.key)
        self._lengths.append(length)
        if self._clock() >= self._due:
            self._adjust()
        self._turn += 1
        if not self._sorted or out_of_balance(workers, self._absolute, self._relative):
            self.reason = "balance" if self._sorted else "load"
            return least_loaded(workers, self._turn)
        self.reason = "bucket"
        # A length that fills several ranges goes to each as often as its share there is large.
        low, high = self.share(length)
        place = low + self._generator.random() * (high - low)
        ordered = sorted(workers, key=lambda worker: worker.index)
        return ordered[min(int(place * len(ordered)), len(ordered) - 1)]

    def share(self, length: int) -> tuple[float, float]:
        """Where the work of prompts of ``length`` lies between the shortest (0) and the longest (1)."""
        total = self._work[-1] or 1
        below = self._work[bisect.bisect_left(self._sorted, length)]
        return below / total, self._work[bisect.bisect_right(self._sorted, length)] / total

    def sent(self, worker: Worker, prompt: Prompt) -> None:
        """Nothing is noted: lengths are counted when they come."""

    def forget(self, worker: Worker) -> None:
        """Nothing is kept of workers."""

    def _adjust(self) -> None:
        self._due = self._clock() + self._seconds
        self._sorted = sorted(self._lengths)
        self._work = [0, *itertools.accumulate(self._sorted)]
