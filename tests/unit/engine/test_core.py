"""The loop: overlap, waiting, control calls, faults."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sglang_lite.engine.core import EngineCore
from sglang_lite.engine.frames import Command, Keys
from sglang_lite.engine.messages import (
    Abort,
    AbortAll,
    Finish,
    Flush,
    Load,
    Pause,
    Ping,
    QueryLoad,
    Reply,
    Resume,
    Shutdown,
)
from sglang_lite.types import FinishCode
from tests.unit.engine.fakes import CountingScheduler, ScriptedExecutor, ScriptedTransport, requests


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Rig:
    """A core over the fakes, stepped by hand."""

    def __init__(self, *batches: list[Command], depth: int = 2, failing: tuple[int, ...] = ()) -> None:
        self.clock = Clock()
        self.scheduler: Any = CountingScheduler()
        self.executor = ScriptedExecutor(self.scheduler.log, failing)
        self.transport = ScriptedTransport(*batches)
        self.core = EngineCore(self.scheduler, self.executor, self.transport, depth=depth, clock=self.clock)

    def turns(self, count: int) -> None:
        for _ in range(count):
            self.core.step(self.core.patience())

    def tokens(self, key: int) -> list[int]:
        return [int(t) for out in self.transport.outputs for t in out.token[out.key == key] if t >= 0]

    def finish(self, key: int) -> list[int]:
        return [int(c) for out in self.transport.outputs for c in out.finish[out.key == key] if c]

    @property
    def replies(self) -> list[Reply]:
        return [event for event in self.transport.events if isinstance(event, Reply)]


def test_a_request_is_served_to_its_end() -> None:
    rig = Rig([requests([1, 2], max_new_tokens=3)])
    rig.turns(5)
    assert rig.tokens(1) == rig.tokens(2) == [5, 5, 5]
    assert rig.finish(1) == rig.finish(2) == [FinishCode.LENGTH]


def test_the_next_step_is_planned_while_one_runs() -> None:
    rig = Rig([requests([1])])
    rig.turns(2)
    assert rig.scheduler.log == [
        "admit",
        "plan 0",
        "plan 1",
        "collect 0",
        "commit 0",
        "plan 2",
        "collect 1",
        "commit 1",
    ]
    assert rig.executor.most_in_flight == 2


def test_without_overlap_a_step_is_planned_after_the_commit() -> None:
    rig = Rig([requests([1])], depth=1)
    rig.turns(2)
    assert rig.scheduler.log == ["admit", "plan 0", "collect 0", "commit 0", "plan 1", "collect 1", "commit 1"]
    assert rig.executor.most_in_flight == 1


@pytest.mark.parametrize("depth", [1, 2])
def test_the_core_waits_only_when_there_is_nothing_to_do(depth: int) -> None:
    rig = Rig([requests([1], max_new_tokens=3)], depth=depth)
    rig.turns(1)
    while not rig.finish(1):
        rig.turns(1)
        assert rig.transport.waits[-1] == 0, "a running request must not wait for messages"
    rig.turns(3)
    rig.clock.now += 2.0
    rig.turns(3)
    assert rig.transport.waits[-1] is None, "an idle core waits for a message alone"


def test_an_idle_core_waits_for_the_schedulers_deadline() -> None:
    rig = Rig([requests([1])])
    rig.scheduler.deadline = 0.008
    rig.turns(2)
    assert rig.transport.waits[-1] == pytest.approx(0.008)
    rig.clock.now = 0.008
    rig.turns(1)
    assert rig.tokens(1) == [5]


def test_a_missed_deadline_does_not_make_the_loop_spin() -> None:
    rig = Rig()
    rig.scheduler.deadline = -5.0
    rig.turns(2)
    assert rig.transport.waits[-1] is not None
    assert rig.transport.waits[-1] >= 0.001


def test_reclaiming_goes_on_in_slices_while_idle() -> None:
    rig = Rig()
    rig.scheduler.reclaimable = 1000
    turns = 0
    while rig.scheduler.reclaimable:
        rig.turns(1)
        turns += 1
    assert turns >= 3
    rig.turns(2)
    assert rig.transport.waits[-1] is None


def test_abort_answers_with_the_number_of_live_requests() -> None:
    rig = Rig([requests([1, 2, 3], max_new_tokens=100)], [Keys(Abort(0, 9), np.array([2, 77], np.int64))])
    rig.turns(4)
    assert rig.replies == [Reply(9, True, 1)]
    assert rig.finish(2) == [FinishCode.ABORTED]
    assert len(rig.tokens(2)) == 1, "no token follows an accepted abort"
    assert len(rig.tokens(1)) == 4


def test_abort_all_and_finish() -> None:
    rig = Rig([requests([1, 2], max_new_tokens=100)], [Keys(Finish(), np.array([1], np.int64))], [AbortAll(0, 4)])
    rig.turns(4)
    assert rig.finish(1) == []
    assert rig.finish(2) == [FinishCode.ABORTED]
    assert rig.replies == [Reply(4, True, 1)]


def test_flush_is_refused_while_requests_run_and_done_when_idle() -> None:
    rig = Rig([requests([1], max_new_tokens=3), Flush(0, 1, 0.0)])
    rig.turns(6)
    assert rig.replies == [Reply(1, False)]
    rig.transport.batches.append([Flush(0, 2, 0.0)])
    rig.turns(1)
    assert rig.replies[-1] == Reply(2, True)
    assert rig.scheduler.flushed == 1


def test_flush_waits_for_running_requests_within_its_timeout() -> None:
    rig = Rig([requests([1], max_new_tokens=3), Flush(0, 1, 5.0)])
    rig.turns(6)
    assert rig.replies == [Reply(1, True)]


def test_flush_gives_up_at_its_deadline() -> None:
    rig = Rig([requests([1], max_new_tokens=10_000), Flush(0, 1, 0.5)])
    rig.turns(5)
    assert rig.replies == []
    rig.clock.now = 0.5
    rig.turns(1)
    assert rig.replies == [Reply(1, False)]


def test_flush_right_after_the_last_stream_waits_for_the_overlapped_pass() -> None:
    rig = Rig([requests([1], max_new_tokens=2)])
    while not rig.finish(1):
        rig.turns(1)
    assert rig.executor.in_flight == 1, "the pass planned ahead is still there"
    rig.transport.batches.append([Flush(0, 3, 0.0)])
    rig.turns(2)
    assert rig.replies == [Reply(3, True)]


def test_pause_and_resume() -> None:
    rig = Rig([requests([1], max_new_tokens=9)], [Pause(0, 1, "in_place")], [], [], [Resume(0, 2)])
    rig.turns(4)
    assert len(rig.tokens(1)) == 2, "steps in flight are finished, none is added"
    rig.turns(8)
    assert len(rig.tokens(1)) == 9
    assert rig.replies == [Reply(1), Reply(2)]


def test_a_pause_is_confirmed_when_nothing_is_in_flight_any_more() -> None:
    """Whoever reads the reply may rely on it: no token follows, and the pages of a retraction are free."""
    rig = Rig([requests([1], max_new_tokens=9)], [Pause(0, 1, "retract")])
    seen = []
    for _ in range(5):
        rig.turns(1)
        seen.append((rig.executor.in_flight, bool(rig.replies)))
    assert seen == [(1, False), (0, True), (0, True), (0, True), (0, True)]
    assert len(rig.tokens(1)) == 2


def test_a_pause_that_is_lifted_at_once_is_confirmed_first() -> None:
    rig = Rig([requests([1], max_new_tokens=9)], [Pause(0, 1, "in_place"), Resume(0, 2)])
    rig.turns(12)
    assert rig.replies == [Reply(1), Reply(2)]
    assert len(rig.tokens(1)) == 9


def test_control_calls_are_answered_while_saturated() -> None:
    rig = Rig([requests(range(8), max_new_tokens=100)], [Ping(0, 1), QueryLoad(0, 2)])
    rig.turns(2)
    assert rig.replies == [Reply(1)]
    loads = [event for event in rig.transport.events if isinstance(event, Load)]
    assert loads[0].call == 2
    assert loads[0].snapshot.num_running == 8


class LongSteps(ScriptedExecutor):
    """A step is done after a few looks at it."""

    looks = 3

    def wait(self, timeout: float) -> bool:
        self.looks -= 1
        return self.looks < 0


def test_control_calls_are_answered_while_a_long_step_runs() -> None:
    rig = Rig([requests([1, 2], max_new_tokens=9)], [Keys(Abort(0, 1), np.array([2], np.int64))], [Flush(0, 2, 0.0)])
    rig.core = EngineCore(rig.scheduler, LongSteps(rig.scheduler.log), rig.transport, clock=rig.clock)
    rig.turns(1)
    assert rig.replies == [Reply(1, True, 1), Reply(2, False)]
    assert rig.finish(2) == [FinishCode.ABORTED]
    assert rig.tokens(2) == [], "no token follows an accepted abort"
    assert rig.tokens(1) == [5]


def test_a_failed_step_ends_its_requests_and_nothing_else() -> None:
    rig = Rig([requests([1], max_new_tokens=5)], [], [requests([2], max_new_tokens=2)], failing=(1,))
    rig.turns(8)
    assert rig.finish(1) == [FinishCode.ERROR]
    assert rig.finish(2) == [FinishCode.LENGTH]
    texts = [text for out in rig.transport.outputs for text in out.messages.values()]
    assert texts == ["step 1 ran out of luck"]


def test_load_is_reported_once_per_second_of_work_and_once_after_it() -> None:
    rig = Rig([requests([1], max_new_tokens=40)], depth=1)
    for _ in range(24):
        rig.clock.now += 0.125
        rig.turns(1)
    reports = [event for event in rig.transport.events if isinstance(event, Load)]
    assert len(reports) == 3
    assert reports[-1].snapshot.generation_throughput == pytest.approx(8, rel=0.2)
    for _ in range(64):
        rig.clock.now += 0.125
        rig.turns(1)
    assert len([event for event in rig.transport.events if isinstance(event, Load)]) <= 6


def test_a_fault_of_the_scheduler_leaves_the_loop() -> None:
    rig = Rig([requests([1])])
    rig.scheduler.broken = True
    with pytest.raises(RuntimeError, match="broken"):
        rig.core.run()


def test_shutdown_ends_the_loop() -> None:
    rig = Rig([requests([1], max_new_tokens=100)], [], [Shutdown()])
    rig.core.run()
    assert 1 <= len(rig.tokens(1)) <= 3
