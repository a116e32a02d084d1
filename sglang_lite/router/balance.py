"""Loads of workers compared."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_lite.router.workers import Worker

_BEGINNING = 1024


def least_loaded(workers: Sequence[Worker], turn: int) -> Worker:
    """One of the least loaded ones; these take turns, so that requests spread while nothing runs."""
    loads = [worker.load for worker in workers]  # read once: other processes change them meanwhile
    low = min(loads)
    idle = [worker for worker, load in zip(workers, loads, strict=True) if load == low]
    return idle[turn % len(idle)]


def by_beginning(workers: Sequence[Worker], key: bytes, slack: int, turn: int) -> Worker:
    """The worker that belongs to the beginning of ``key``, unless it has over ``slack`` more than the least loaded.

    Every process of one router finds the same one: they are forks of one parent, and so hash texts alike.
    """
    beginning = key[:_BEGINNING]
    worker = max(workers, key=lambda one: hash((beginning, one.url)))
    return worker if worker.load - min(one.load for one in workers) <= slack else least_loaded(workers, turn)


def out_of_balance(workers: Sequence[Worker], absolute: int, relative: float) -> bool:
    """Whether max - min and max / min of the loads are above the limits."""
    loads = [worker.load for worker in workers]
    low, high = min(loads), max(loads)
    return high - low > absolute and high > relative * low
