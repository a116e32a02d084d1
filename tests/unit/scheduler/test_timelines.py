"""Where the time of a request went, as the scheduler records it."""

from __future__ import annotations

import numpy as np
import pytest

from sglang_lite.engine.frames import decode_event, encode_output
from sglang_lite.scheduler import SchedulerConfig
from sglang_lite.types import OutputColumns, RequestTimeline
from tests.support.scheduler_driver import Driver


def driver(**options: int) -> Driver:
    config = {"num_pages": 64, "page_size": 1, "context_length": 64, "max_running_requests": 4, **options}
    return Driver(SchedulerConfig(**config, overlap=False))  # type: ignore[arg-type]


def timelines(running: Driver, seconds: float = 1.0, steps: int = 40) -> dict[int, RequestTimeline]:
    """The last record of each request; every step takes ``seconds``."""
    found: dict[int, RequestTimeline] = {}
    for _ in range(steps):
        plan = running.plan()
        running.now += seconds
        if plan is not None:
            found |= running.commit().timelines
    return found


def test_a_lone_request_waits_for_nothing() -> None:
    running = driver(chunked_prefill_size=4)
    running.admit([1], [range(10)], max_new_tokens=3)
    record = timelines(running)[1]
    assert record == RequestTimeline(prefill_seconds=3.0, prefill_chunks=3, computed_tokens=10)


def test_the_wait_for_a_row_is_told_from_the_wait_for_pages() -> None:
    rows = driver(max_running_requests=1)
    rows.admit([1, 2], [[5] * 4, [6] * 4], max_new_tokens=5)
    record = timelines(rows)[2]
    assert record.queue_seconds == 5.0
    assert record.waits == {"rows": 5.0}
    pages = driver(num_pages=40)
    pages.admit([1, 2], [[5] * 20, [6] * 20], max_new_tokens=5)
    assert timelines(pages)[2].waits == {"pages": 5.0}


def test_the_wait_for_the_prompt_tokens_of_a_step() -> None:
    running = driver(max_prefill_tokens=8)
    running.admit([1, 2], [[5] * 8, [6] * 8], max_new_tokens=2)
    assert timelines(running)[2].waits == {"prefill_budget": 1.0}


def test_a_pause_and_a_step_at_hand() -> None:
    running = driver()
    running.admit([1], [[5] * 4], max_new_tokens=20)
    running.plan()
    running.now += 0.25
    running.admit([2], [[6] * 4], max_new_tokens=2)
    running.now += 0.5
    running.commit()
    running.scheduler.pause("in_place", running.now)
    running.plan()
    running.now += 4.0
    running.scheduler.resume()
    assert timelines(running)[2].waits == {"step": 0.5, "pause": 4.0}


def test_preemptions_and_the_wait_behind_them() -> None:
    running = driver(num_pages=48)
    # Both grow beyond the pool: the younger gives up its pages until the older one is done.
    running.admit([1, 2], [[5] * 4, [6] * 4], max_new_tokens=30)
    record = timelines(running, steps=120)[2]
    assert record.preemptions >= 1
    assert record.requeue_seconds > 0
    assert sum(record.waits.values()) == pytest.approx(record.queue_seconds + record.requeue_seconds)
    assert record.computed_tokens > 4


def test_a_request_that_ends_in_the_queue_has_a_record() -> None:
    running = driver(max_running_requests=1)
    running.admit([1, 2], [[5] * 4, [6] * 4], max_new_tokens=20)
    running.plan()
    running.now += 2.0
    running.scheduler.abort([2], running.now)
    record = running.scheduler.drain_outputs().timelines[2]
    assert (record.queue_seconds, record.prefill_chunks) == (2.0, 0)
    assert record.waits == {"rows": 2.0}


def test_records_travel_with_the_frame() -> None:
    empty = np.empty(0, np.int32)
    codes = np.empty(0, np.uint8)
    record = RequestTimeline(queue_seconds=1.5, waits={"pages": 1.5}, prefill_chunks=2, preemptions=1)
    columns = OutputColumns(np.empty(0, np.int64), empty, codes, empty, empty, codes, timelines={7: record})
    event = decode_event(encode_output(columns))
    assert isinstance(event, OutputColumns)
    assert event.timelines == {7: record}
