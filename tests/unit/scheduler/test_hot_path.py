"""A steady decode step costs the same number of Python operations however many requests run."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import numpy as np
import pytest

from sglang_lite.engine.frames import encode_output
from sglang_lite.scheduler import SchedulerConfig
from sglang_lite.types import RequestExtras
from tests.support.null_executor import NullExecutor
from tests.support.scheduler_driver import Driver


def running_driver(num_running: int, *, fair: bool = False) -> Driver:
    config = SchedulerConfig(
        num_pages=num_running * 16,
        page_size=16,
        context_length=256,
        max_running_requests=num_running,
        chunked_prefill_size=-1,
        eos_token_ids=(2,),
        fair=fair,
    )
    driver = Driver(config, NullExecutor(num_running))
    prompts = [[1000 + row, 7, 8, 9, row] for row in range(num_running)]
    extras = {row: RequestExtras(tenant=f"tenant {row % 4}") for row in range(num_running)} if fair else None
    driver.admit(range(num_running), prompts, max_new_tokens=200, extras=extras)
    while driver.scheduler.stats().num_waiting or driver.scheduler.stats().num_prefilling:
        driver.step()
    for _ in range(5):
        driver.step()
    return driver


def operations(driver: Driver) -> list[int]:
    """Calls and lines executed by each of 20 decode steps; page boundaries and a new gather lie between them."""
    counts: list[int] = []

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        counts[-1] += 1
        return trace

    for _ in range(20):
        counts.append(0)
        sys.settrace(trace)
        try:
            plan = driver.scheduler.plan(0.0)
        finally:
            sys.settrace(None)
        assert plan is not None
        driver.executor.submit(plan)
        output = driver.executor.collect()
        sys.settrace(trace)
        try:
            encode_output(driver.scheduler.commit(output, 0.0))
        finally:
            sys.settrace(None)
    return counts


@pytest.mark.parametrize("fair", [False, True])
def test_operations_do_not_grow_with_the_number_of_rows(fair: bool) -> None:
    few, many = running_driver(4, fair=fair), running_driver(600, fair=fair)
    # Both drivers are at the same step of the same lengths, so even the steps that need pages compare.
    assert operations(few) == operations(many)


def test_plans_share_what_does_not_change() -> None:
    driver = running_driver(64)
    first = driver.plan()
    driver.commit()
    second = driver.plan()
    assert first is not None and second is not None
    for name in ("rows", "sampling"):
        assert getattr(first, name) is getattr(second, name)
    assert first.kv_lens is second.positions
    assert np.array_equal(second.kv_lens, first.kv_lens + 1)
