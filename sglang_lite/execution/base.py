"""The executor interface: what the engine core drives."""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import Future
from typing import Protocol, runtime_checkable

from sglang_lite.scheduler.plan import StepOutput, StepPlan
from sglang_lite.types import ProfileOptions, StartupError


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


@runtime_checkable
class MaintainedExecutor(Protocol):
    """What an executor whose weights can be replaced, and whose steps can be recorded, offers beside ``Executor``.

    The futures fail with ``StartupError`` where the caller asked for something impossible. Everything happens between
    two plans; the caller sees to it that no plan is submitted while weights are replaced.
    """

    def load_weights(self, directory: str) -> Future[str]:
        """Replace the model's weights by those of another checkpoint of the same model; what is there stays if that
        one cannot be used."""

    def release_memory(self, tags: Collection[str]) -> Future[str]:
        """Let go of the KV pool (``kv_cache``), the weights (``weights``) or both; no plan may follow before they are
        back."""

    def resume_memory(self, tags: Collection[str]) -> Future[str]:
        """Take that memory again: an empty pool, the weights of the directory they came from."""

    def start_profile(self, options: ProfileOptions) -> Future[str]:
        """Record the steps from now on."""

    def stop_profile(self) -> Future[str]:
        """End the recording; the result is the file of the trace."""


class WrongMomentError(StartupError):
    """What was asked for is possible, but not now."""


class ExecutionError(Exception):
    """A forward pass failed. The requests of that plan end with an error; the engine goes on."""


class RankLostError(Exception):
    """A rank that shares the model failed or is gone, and with it the replica: no step can run any more."""
