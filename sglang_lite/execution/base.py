"""The executor interface: what the engine core drives."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Protocol, runtime_checkable

from sglang_lite.scheduler.plan import StepOutput, StepPlan


class Executor(Protocol):
    """Runs plans strictly in the order of submission, on one device stream (or one worker thread)."""

    def submit(self, plan: StepPlan) -> None:
        """Queue a plan and return at once. The caller keeps the plan's arrays unchanged until its result."""

    def collect(self) -> StepOutput:
        """Block until the oldest submitted plan is done and return its result.

        Raises:
            ExecutionError: the plan failed; the executor stays usable.
        """

    @property
    def in_flight(self) -> int:
        """Plans submitted and not yet collected."""

    def close(self) -> None:
        """Finish or drop what is queued and release device memory and threads."""


@runtime_checkable
class InterruptibleExecutor(Protocol):
    """What an executor with long steps offers beside ``Executor``: to look up from the wait.

    The engine core then answers control calls and takes aborts while a step runs, instead of after it.
    """

    def wait(self, timeout: float) -> bool:
        """Whether ``collect`` would return at once; waits up to ``timeout`` seconds for that."""


@runtime_checkable
class AdaptingExecutor(Protocol):
    """What an executor with low-rank adapters offers beside ``Executor``.

    Plans submitted before a call run before it takes effect, those submitted after it run with it. The caller sees to
    it that no plan names a slot while that is being filled.
    """

    def load_adapter(self, slot: int, directory: str) -> Future[None]:
        """Read an adapter and put it into a slot; returns at once. The future fails with ``StartupError``."""

    def unload_adapter(self, slot: int) -> Future[None]:
        """Empty a slot."""


class ExecutionError(Exception):
    """A forward pass failed. The requests of that plan end with an error; the engine goes on."""


class RankLostError(Exception):
    """A rank that shares the model failed or is gone, and with it the replica: no step can run any more."""
