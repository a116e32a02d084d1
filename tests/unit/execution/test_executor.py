"""The worker thread: order, failures, closing."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import cast

import numpy as np
import pytest

from sglang_lite.execution.base import ExecutionError, InterruptibleExecutor
from sglang_lite.execution.executor import TorchExecutor
from sglang_lite.execution.model_runner import ModelRunner
from sglang_lite.scheduler.plan import StepOutput, StepPlan
from tests.support.step_plans import PlanMaker, PlannedSequence


class ScriptedRunner:
    """Waits for its gate before each plan; fails for the steps it is told to."""

    def __init__(self) -> None:
        self.gate = threading.Semaphore(0)
        self.started = threading.Semaphore(0)
        self.failing: set[int] = set()
        self.steps: list[int] = []
        self.threads: set[str] = set()

    def run(self, plan: StepPlan) -> StepOutput:
        self.started.release()
        assert self.gate.acquire(timeout=20)
        self.steps.append(plan.step)
        self.threads.add(threading.current_thread().name)
        if plan.step in self.failing:
            raise ValueError("broken weights")
        return StepOutput(plan.step, np.array([plan.step], dtype=np.int32), [])


@pytest.fixture
def runner() -> ScriptedRunner:
    return ScriptedRunner()


@pytest.fixture
def executor(runner: ScriptedRunner) -> Iterator[TorchExecutor]:
    executor = TorchExecutor(cast(ModelRunner, runner))
    yield executor
    runner.gate.release(100)
    executor.close()


@pytest.fixture
def plans() -> list[StepPlan]:
    maker = PlanMaker(4, 8)
    sequence = PlannedSequence(0)
    return [maker.plan([], [(sequence, [1])]) for _ in range(4)]


def test_results_come_in_the_order_of_submission(
    runner: ScriptedRunner, executor: TorchExecutor, plans: list[StepPlan]
) -> None:
    for plan in plans:
        executor.submit(plan)
    assert executor.in_flight == 4
    runner.gate.release(4)
    assert [executor.collect().step for _ in plans] == [0, 1, 2, 3]
    assert executor.in_flight == 0
    assert runner.threads == {"executor"}


def test_submit_does_not_wait(runner: ScriptedRunner, executor: TorchExecutor, plans: list[StepPlan]) -> None:
    executor.submit(plans[0])
    assert runner.started.acquire(timeout=20)
    executor.submit(plans[1])
    assert executor.in_flight == 2 and runner.steps == []


def test_a_failing_plan_fails_alone(runner: ScriptedRunner, executor: TorchExecutor, plans: list[StepPlan]) -> None:
    runner.failing = {1}
    runner.gate.release(3)
    for plan in plans[:3]:
        executor.submit(plan)
    assert executor.collect().step == 0
    with pytest.raises(ExecutionError, match=r"step 1.*ValueError: broken weights"):
        executor.collect()
    assert executor.collect().step == 2
    assert executor.in_flight == 0


def test_collect_needs_a_plan(executor: TorchExecutor) -> None:
    with pytest.raises(RuntimeError, match="without a submitted plan"):
        executor.collect()


def test_waiting_for_the_oldest_result(runner: ScriptedRunner, executor: TorchExecutor, plans: list[StepPlan]) -> None:
    """The engine looks up from a long step: the result stays for ``collect``, in order."""
    assert isinstance(executor, InterruptibleExecutor)
    executor.submit(plans[0])
    executor.submit(plans[1])
    assert not executor.wait(0.01)
    runner.gate.release(2)
    assert executor.wait(20) and executor.wait(0)
    assert executor.in_flight == 2
    assert [executor.collect().step for _ in range(2)] == [0, 1]


def test_close_drops_what_is_queued(runner: ScriptedRunner, plans: list[StepPlan]) -> None:
    executor = TorchExecutor(cast(ModelRunner, runner))
    for plan in plans:
        executor.submit(plan)
    assert runner.started.acquire(timeout=20)
    closing = threading.Thread(target=executor.close)
    closing.start()
    while not executor._closing.is_set():
        threading.Event().wait(0.001)
    runner.gate.release()
    closing.join(timeout=20)
    assert not closing.is_alive() and runner.steps == [0]
    executor.close()
    with pytest.raises(RuntimeError, match="closed"):
        executor.submit(plans[0])
