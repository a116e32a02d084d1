"""A parallel group of threads: the ranks of a test in one process, each with its share of a model."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")

_SECONDS = 30.0
"""A rank that waits this long for the others fails the test, because their operations differ."""


class _Meeting:
    """Where the ranks leave their tensors for each other."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=_SECONDS)
        self.tensors: list[Tensor] = [torch.empty(0)] * size


class ThreadGroup:
    """See ``layers.parallel.ParallelGroup``; one object a thread."""

    def __init__(self, meeting: _Meeting, rank: int, size: int, expert_parts: int) -> None:
        self._meeting = meeting
        self._rank = rank
        self._size = size
        self._expert_parts = expert_parts

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    @property
    def expert_parts(self) -> int:
        return self._expert_parts

    def _exchange(self, tensor: Tensor) -> list[Tensor]:
        meeting = self._meeting
        meeting.tensors[self._rank] = tensor.clone()
        meeting.barrier.wait()
        found = list(meeting.tensors)
        meeting.barrier.wait()
        assert len({part.shape for part in found}) == 1, "the ranks exchange tensors of different shapes"
        return found

    def all_reduce(self, tensor: Tensor) -> Tensor:
        assert tensor.is_contiguous()
        return tensor.copy_(torch.stack(self._exchange(tensor)).sum(0))

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        return torch.cat(self._exchange(tensor), dim)

    def broadcast(self, tensor: Tensor) -> Tensor:
        assert tensor.is_contiguous()
        return tensor.copy_(self._exchange(tensor)[0])


def run_ranks(size: int, work: Callable[[ThreadGroup], Result], *, expert_parts: int = 1) -> list[Result]:
    """Run ``work`` once for each rank, at the same time; the results in the order of the ranks."""
    meeting = _Meeting(size)
    groups = [ThreadGroup(meeting, rank, size, expert_parts) for rank in range(size)]

    def run(group: ThreadGroup) -> Result:
        try:
            return work(group)
        except BaseException:
            meeting.barrier.abort()  # the others would wait for this rank
            raise

    with ThreadPoolExecutor(size) as threads:
        futures = [threads.submit(run, group) for group in groups]
        errors = [error for future in futures if (error := future.exception()) is not None]
        for error in errors:
            if not isinstance(error, threading.BrokenBarrierError):
                raise error
        if errors:
            raise errors[0]
        return [future.result() for future in futures]
