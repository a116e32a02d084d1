"""The executor: one worker thread that runs plans in the order of submission."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Protocol

import torch

from sglang_lite.execution.base import ExecutionError
from sglang_lite.execution.memory_saver import MemorySaver
from sglang_lite.execution.model_adapters import ModelAdapters
from sglang_lite.execution.profiler import StepProfiler
from sglang_lite.scheduler.plan import StepOutput, StepPlan
from sglang_lite.types import ProfileOptions, StartupError

logger = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True)
class _Task:
    """Something to do between two plans, and who waits for it."""

    action: Callable[[], None]
    done: Future[Any]

    def run(self) -> None:
        _settling(self.action, self.done)()
        if not self.done.done():
            self.done.set_result(None)


def _settling(action: Callable[[], None], future: Future[Any]) -> Callable[[], None]:
    """``action`` with whatever goes wrong in it handed to the future: nobody else would hear of it."""

    def run() -> None:
        try:
            action()
        except Exception as error:  # whatever failed, it is the caller's to tell
            future.set_exception(error)

    return run


class Reloader(Protocol):
    """Reads other weights of the model that a runner has."""

    def read(self, directory: str) -> Callable[[], None]:
        """Check and read them; the result puts them in place and must not run during a step."""


class StepRunner(Protocol):
    """What runs one plan after another: a model runner of any device."""

    @property
    def adapters(self) -> ModelAdapters | None:
        """Low-rank adapters of the model."""

    def run(self, plan: StepPlan) -> StepOutput:
        """Run a plan and wait for its result."""


class TorchExecutor:
    """See ``execution.base.Executor``.

    Args:
        runner: used by the worker thread only.
        num_threads: threads of one operation; None keeps torch's choice.
        reloader: of the runner's weights; None where they cannot be replaced.
        saver: of the runner's memory; None where it is not given back.
    """

    def __init__(
        self,
        runner: StepRunner,
        *,
        num_threads: int | None = None,
        reloader: Reloader | None = None,
        saver: MemorySaver | None = None,
    ) -> None:
        self._reloader = reloader
        self._saver = saver
        self._profiler = StepProfiler()
        self._runner = runner
        self._num_threads = num_threads
        self._plans: SimpleQueue[StepPlan | _Task | None] = SimpleQueue()
        self._results: SimpleQueue[StepOutput | ExecutionError] = SimpleQueue()
        self._arrived: StepOutput | ExecutionError | None = None
        self._in_flight = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="executor", daemon=True)
        self._thread.start()

    def submit(self, plan: StepPlan) -> None:
        """Queue a plan and return at once."""
        if self._closing.is_set():
            raise RuntimeError("the executor is closed")
        self._in_flight += 1
        self._plans.put(plan)

    def collect(self) -> StepOutput:
        """Block until the oldest submitted plan is done.

        Raises:
            ExecutionError: that plan failed; the executor stays usable.
            RuntimeError: nothing was submitted.
        """
        if not self._in_flight:
            raise RuntimeError("collect() without a submitted plan")
        result = self._results.get() if self._arrived is None else self._arrived
        self._arrived = None
        self._in_flight -= 1
        if isinstance(result, ExecutionError):
            raise result
        return result

    def wait(self, timeout: float) -> bool:
        """Whether ``collect`` would return at once; waits up to ``timeout`` seconds for that."""
        if self._arrived is None:
            try:
                self._arrived = self._results.get(timeout=timeout)
            except Empty:
                return False
        return True

    def load_adapter(self, slot: int, directory: str) -> Future[None]:
        """Read an adapter in a thread of its own, then put it into a slot between two plans."""
        future: Future[None] = Future()

        def read() -> None:
            torch.set_num_threads(1)  # counts for this thread, which only copies: no thread pool of its own
            adapters = self._adapters()
            weights = adapters.read(directory)
            self._plans.put(_Task(lambda: adapters.install(slot, weights), future))

        threading.Thread(target=_settling(read, future), name="load adapter", daemon=True).start()
        return future

    def unload_adapter(self, slot: int) -> Future[None]:
        """Empty a slot between two plans."""
        future: Future[None] = Future()
        self._plans.put(_Task(lambda: self._adapters().clear(slot), future))
        return future

    def load_weights(self, directory: str) -> Future[str]:
        """Read a checkpoint in a thread of its own, then put its weights in place between two plans."""
        future: Future[str] = Future()

        def read() -> None:
            if self._reloader is None:
                raise StartupError(
                    "weights can be replaced on the host alone, by one rank and without adapters; restart the server "
                    "with another --model-path"
                )
            install = self._reloader.read(directory)
            self._plans.put(_Task(lambda: self._install(install, directory), future))

        threading.Thread(target=_settling(read, future), name="load weights", daemon=True).start()
        return future

    def _install(self, install: Callable[[], None], directory: str) -> None:
        install()
        if self._saver is not None:
            self._saver.loaded(directory)

    def release_memory(self, tags: Collection[str]) -> Future[str]:
        """Let go of these kinds of memory, between two plans."""

        def release() -> str:
            self._known_saver().release(tags)
            return ""

        return self._between_plans(release)

    def resume_memory(self, tags: Collection[str]) -> Future[str]:
        """Read what has to be read in a thread of its own, then put all of it in place between two plans."""
        future: Future[str] = Future()

        def read() -> None:
            self._plans.put(_Task(self._known_saver().read(tags), future))

        threading.Thread(target=_settling(read, future), name="resume memory", daemon=True).start()
        return future

    def _known_saver(self) -> MemorySaver:
        if self._saver is None:
            raise StartupError("memory is given back by servers that were started with --enable-memory-saver")
        return self._saver

    def start_profile(self, options: ProfileOptions) -> Future[str]:
        """Record what the worker thread does from the next plan on."""

        def start() -> str:
            self._profiler.start(options)
            return ""

        return self._between_plans(start)

    def stop_profile(self) -> Future[str]:
        """Write the trace, between two plans."""
        return self._between_plans(lambda: str(self._profiler.stop()))

    def _between_plans(self, action: Callable[[], str]) -> Future[str]:
        future: Future[str] = Future()
        self._plans.put(_Task(lambda: future.set_result(action()), future))
        return future

    def _adapters(self) -> ModelAdapters:
        if self._runner.adapters is None:
            raise StartupError("the model was loaded without adapters; start the server with --enable-lora")
        return self._runner.adapters

    @property
    def in_flight(self) -> int:
        """Plans submitted and not yet collected."""
        return self._in_flight

    def close(self) -> None:
        """Drop what is queued, wait for the plan that is running, end the thread. May be called twice."""
        self._closing.set()
        self._plans.put(None)
        self._thread.join()

    def _work(self) -> None:
        if self._num_threads is not None:
            torch.set_num_threads(self._num_threads)  # counts for the calling thread
        while (plan := self._plans.get()) is not None:
            if self._closing.is_set():
                continue
            if isinstance(plan, _Task):
                plan.run()
            else:
                self._execute(plan)
                self._profiler.step_done()

    def _execute(self, plan: StepPlan) -> None:
        """Run a plan and put its result where ``collect`` takes it."""
        self._results.put(self._run(plan))

    def _run(self, plan: StepPlan) -> StepOutput | ExecutionError:
        try:
            return self._runner.run(plan)
        except Exception as error:  # whatever failed, it ends the requests of this plan and nothing else
            return step_failure(plan.step, error)


def step_failure(step: int, error: Exception) -> ExecutionError:
    """What ``collect`` raises for a step that failed; call it while the error is being handled."""
    logger.exception("step %d failed", step)
    failure = ExecutionError(f"step {step} failed: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure
