"""The stream discipline: host memory is not written while a queued copy has yet to read it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sglang_lite.execution.device_counts import DeviceCounts
from sglang_lite.execution.device_inputs import InputBuffers, PlanPart, whole_plan
from sglang_lite.execution.device_random import exponentials
from sglang_lite.execution.random_numbers import exponentials as host_exponentials
from sglang_lite.execution.streams import FinishedStep, HostRing, PendingStep, PlanGate, TokenBuffers
from sglang_lite.scheduler.plan import StepOutput
from tests.support.host_device import HostDevice, HostEvent
from tests.support.step_plans import PlanMaker, PlannedSequence


class WatchedDevice(HostDevice):
    """Keeps its events, to see what was waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[HostEvent] = []

    def event(self) -> HostEvent:
        self.events.append(HostEvent(self))
        return self.events[-1]


def test_a_buffer_comes_back_behind_its_own_copy() -> None:
    device = WatchedDevice()
    ring = HostRing(device, 8)
    with device.activate():
        buffers = []
        for _ in range(4):
            buffers.append(ring.take().data_ptr())
            ring.queued()
    assert buffers[0] == buffers[2] != buffers[1] == buffers[3]
    # Each event was recorded behind the two uses of its buffer, and waited for before every use.
    assert [(event.num_records, event.num_synchronized) for event in device.events] == [(2, 2), (2, 2)]


def test_plans_wait_for_the_plans_before() -> None:
    device = WatchedDevice()
    gate = PlanGate(device)
    with device.activate():
        for _ in range(3):
            gate.enter()
            gate.leave()
    assert (device.events[0].num_synchronized, device.events[0].num_records) == (3, 3)


def test_every_step_passes_both() -> None:
    """The inputs of a step go through the ring once, and its plans through the gate."""
    device = WatchedDevice()
    buffers = InputBuffers(device, 64)
    maker = PlanMaker(4, 64)
    with device.activate():
        for count in (1, 3, 40):  # the last one makes the buffers grow
            plan = maker.plan([], [(PlannedSequence(0), list(range(count)))])
            inputs = buffers.stage(whole_plan(plan), 4, plan.sample_index)
            buffers.upload()
            assert inputs.input_ids.device.tolist() == list(range(count))
            assert inputs.sample_tokens.device.tolist() == [count - 1]
            assert inputs.sample_rows.device.tolist() == [0]
    assert sum(event.num_records for event in device.events) == 3


def test_fixed_buffers_do_not_grow() -> None:
    device = HostDevice()
    buffers = InputBuffers(device, 64, fixed=True)
    plan = PlanMaker(4, 64).plan([], [(PlannedSequence(0), list(range(60)))])
    part: PlanPart = whole_plan(plan)
    with device.activate(), pytest.raises(ValueError, match="integers are needed and 64 fit"):
        buffers.stage(part, 4, plan.sample_index)


def test_results_own_their_tokens() -> None:
    device = HostDevice()
    memory = TokenBuffers(device, 4)
    buffer = memory.take()
    buffer[:2] = torch.tensor([5, 6], dtype=torch.int32)
    pending = PendingStep(3, buffer, 2, HostEvent(device), [], memory.give_back)
    output = pending.result()
    assert memory.take() is buffer, "the buffer is used again"
    buffer.fill_(0)
    assert (output.step, output.tokens.tolist()) == (3, [5, 6])
    done = StepOutput(4, np.empty(0, dtype=np.int32), [])
    assert FinishedStep(done).step == 4 and FinishedStep(done).result() is done


def test_random_numbers_are_those_of_the_host() -> None:
    seeds = np.array([0, 7, 2**62 + 12345, 2**63 - 1], dtype=np.int64)
    counters = np.array([0, 1, 999, 2**31 - 1], dtype=np.int32)
    expected = host_exponentials(seeds, counters, np.arange(300)[None])
    got = exponentials(torch.from_numpy(seeds), torch.from_numpy(counters.astype(np.int64)), 300)
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-12)


def test_counts_of_many_rows() -> None:
    device = HostDevice()
    with device.activate():
        counts = DeviceCounts(device, 6, 32)
        for row in range(20):  # more than the table has room for at first
            counts.restart(row, np.array([row % 6, row % 6, 1], dtype=np.int32))
        counts.announce(np.array([3, 25], dtype=np.int32))
        rows = torch.tensor([3, 25, 19])
        counts.add(rows, torch.tensor([0, 5, -1]))
        assert counts.of(rows).tolist() == [[1, 1, 0, 2, 0, 0], [0, 0, 0, 0, 0, 1], [0, 3, 0, 0, 0, 0]]
        counts.restart(3, np.empty(0, dtype=np.int32))
        assert counts.of(rows[:1]).sum() == 0
