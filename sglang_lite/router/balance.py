"""Loads of workers compared."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_lite.router.workers import Worker


def least_loaded(workers: Sequence[Worker], turn: int) -> Worker:
    """One of the least loaded ones; these take turns, so that requests spread while nothing runs."""
    low = min(worker.load for worker in workers)
    idle = [worker for worker in workers if worker.load == low]
    return idle[turn % len(idle)]


def out_of_balance(workers: Sequence[Worker], absolute: int, relative: float) -> bool:
    """Whether max - min and max / min of the loads are above the limits."""
    loads = [worker.load for worker in workers]
    low, high = min(loads), max(loads)
    return high - low > absolute and high > relative * low
