"""The executor of an accelerator: one thread queues steps, another waits for them.

While the device runs a step, the first thread already writes the inputs and plans of the next one.
"""

from __future__ import annotations

import threading
from queue import SimpleQueue

from sglang_lite.execution.base import ExecutionError
from sglang_lite.execution.device_runner import DeviceRunner
from sglang_lite.execution.executor import TorchExecutor, step_failure
from sglang_lite.execution.streams import LaunchedStep
from sglang_lite.scheduler.plan import StepPlan


class DeviceExecutor(TorchExecutor):
    """See ``execution.base.Executor``.

    Args:
        runner: launched by the worker thread only; its pending steps are waited for in another.
    """

    def __init__(self, runner: DeviceRunner) -> None:
        self._launcher = runner
        self._pending: SimpleQueue[LaunchedStep | ExecutionError | None] = SimpleQueue()
        self._waiter = threading.Thread(target=self._wait_for_steps, name="device results", daemon=True)
        self._waiter.start()
        super().__init__(runner)

    def close(self) -> None:
        """Drop what is not launched yet, wait for what is, end both threads. May be called twice."""
        super().close()
        self._pending.put(None)
        self._waiter.join()

    def _execute(self, plan: StepPlan) -> None:
        try:
            self._pending.put(self._launcher.launch(plan))
        except Exception as error:  # whatever failed, it ends the requests of this plan and nothing else
            self._pending.put(step_failure(plan.step, error))

    def _wait_for_steps(self) -> None:
        while (pending := self._pending.get()) is not None:
            if isinstance(pending, ExecutionError):
                self._results.put(pending)
                continue
            try:
                self._results.put(pending.result())
            except Exception as error:  # a fault of the device shows when it is waited for
                self._results.put(step_failure(pending.step, error))
