"""The matcher of a request with a grammar goes with its row into every plan that draws for it."""

from __future__ import annotations

from sglang_lite.scheduler import SchedulerConfig
from sglang_lite.types import FinishCode
from tests.support.null_executor import NullExecutor
from tests.support.scheduler_driver import Driver, request_columns
from tests.support.scripted_matcher import ScriptedMatcher


def test_matchers_follow_their_rows_through_chunks_and_preemptions() -> None:
    config = SchedulerConfig(
        num_pages=30,
        page_size=2,
        context_length=64,
        max_running_requests=4,
        chunked_prefill_size=4,
        eos_token_ids=(),
        overlap=True,
    )
    driver = Driver(config, NullExecutor(config.max_running_requests))
    matchers = {key: ScriptedMatcher(key) for key in (2, 4)}
    columns = request_columns([1, 2, 3, 4], [[10 * key] * 5 for key in (1, 2, 3, 4)], max_new_tokens=20)
    driver.scheduler.admit(columns, 0.0, {1: matchers[2], 3: matchers[4]})
    driver.run()
    drawn = dict.fromkeys(matchers, 0)
    for plan in driver.plans:
        for key, matcher in matchers.items():
            drawn[key] += sum(found is matcher for found in plan.matchers.values())
        assert all(0 <= position < len(plan.sample_index) for position in plan.matchers)
    assert all(driver.received[key].finish == FinishCode.LENGTH for key in (1, 2, 3, 4))
    assert driver.scheduler.stats().retractions > 0
    # A plan made ahead of a request's end may draw for it once more.
    assert all(20 <= count <= 21 for count in drawn.values()), drawn


def test_rejected_requests_end_with_the_message() -> None:
    config = SchedulerConfig(num_pages=8, page_size=2, context_length=16, max_running_requests=2, eos_token_ids=())
    driver = Driver(config, NullExecutor(2))
    driver.scheduler.admit(request_columns([1, 2], [[5], [6]], max_new_tokens=2), 0.0)
    driver.scheduler.reject([1, 99], "its grammar is gone")
    driver.drain()
    driver.run()
    assert (driver.received[1].finish, driver.received[1].message) == (FinishCode.ERROR, "its grammar is gone")
    assert driver.received[2].finish == FinishCode.LENGTH
    driver.scheduler.audit()
