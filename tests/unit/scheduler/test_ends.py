"""How requests end: limits, stop tokens, aborts, time-outs, failures."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sglang_lite.scheduler import SchedulerConfig, StepOutput
from sglang_lite.types import FinishCode, RequestExtras, RequestFlags
from tests.support.null_executor import NullExecutor
from tests.support.scheduler_driver import Driver, request_columns


def make_driver(**changes: Any) -> Driver:
    values: dict[str, Any] = {
        "num_pages": 128,
        "page_size": 4,
        "context_length": 64,
        "max_running_requests": 8,
        "eos_token_ids": (13, 20),
    }
    config = SchedulerConfig(**(values | changes))
    return Driver(config, NullExecutor(config.max_running_requests))


def test_end_token_of_the_model_ends_the_request_and_is_sent() -> None:
    driver = make_driver()
    driver.admit([1], [[9]], max_new_tokens=30)
    driver.run()
    received = driver.received[1]
    assert received.tokens == [10, 11, 12, 13]
    assert (received.finish, received.matched) == (FinishCode.STOP_TOKEN, 13)


def test_token_of_a_step_in_flight_is_dropped_after_the_end() -> None:
    driver = make_driver(overlap=True)
    driver.admit([1, 2], [[9], [30]], max_new_tokens=[30, 10])
    driver.run()
    assert driver.received[1].tokens == [10, 11, 12, 13]
    assert driver.received[2].tokens == list(range(31, 41))


def test_stop_tokens_of_the_request() -> None:
    driver = make_driver()
    many = tuple(range(100, 130))
    extras = {0: RequestExtras(stop_token_ids=(33,)), 1: RequestExtras(stop_token_ids=(*many, 42))}
    driver.admit([1, 2, 3], [[30], [38], [31]], max_new_tokens=6, extras=extras)
    driver.run()
    assert [driver.received[key].tokens for key in (1, 2, 3)] == [[31, 32, 33], [39, 40, 41, 42], list(range(32, 38))]
    assert [driver.received[key].matched for key in (1, 2, 3)] == [33, 42, -1]


def test_ignore_eos_disables_model_and_request_stop_tokens() -> None:
    driver = make_driver()
    extras = {0: RequestExtras(stop_token_ids=(12,))}
    driver.admit([1], [[9]], max_new_tokens=6, flags=int(RequestFlags.IGNORE_EOS), extras=extras)
    driver.run()
    assert driver.received[1].tokens == [10, 11, 12, 13, 14, 15]
    assert driver.received[1].finish == FinishCode.LENGTH


def test_min_new_tokens_suppresses_end_and_stop_tokens() -> None:
    driver = make_driver()
    extras = {0: RequestExtras(stop_token_ids=(11,))}
    driver.admit([1], [[9]], max_new_tokens=30, min_new_tokens=6, extras=extras)
    driver.run()
    # 11 and 13 are skipped while six tokens are not reached; then 20 ends it.
    assert driver.received[1].tokens == [10, 12, 14, 15, 16, 17, 18, 19, 20]
    assert driver.plans[0].suppressed == {0: (13, 20, 11)}


def test_stop_is_reported_where_limit_and_end_token_coincide() -> None:
    driver = make_driver()
    driver.admit([1], [[9]], max_new_tokens=4)
    driver.run()
    assert driver.received[1].finish == FinishCode.STOP_TOKEN
    assert driver.received[1].matched == driver.received[1].tokens[-1] == 13


def test_prefill_only_request_ends_without_a_token() -> None:
    driver = make_driver(overlap=True)
    driver.admit([1], [list(range(30, 50))], max_new_tokens=0)
    driver.run()
    assert driver.received[1].tokens == []
    assert driver.received[1].finish == FinishCode.LENGTH
    assert driver.scheduler.stats().cached_pages == 5


@pytest.mark.parametrize(("length", "limit", "sent"), [(60, 4, 4), (63, 1, 1), (63, 100, 1), (64, 0, 0), (1, 63, 63)])
def test_context_length_is_reached_exactly(length: int, limit: int, sent: int) -> None:
    driver = make_driver(eos_token_ids=())
    driver.admit([1], [[30] * length], max_new_tokens=limit)
    driver.run()
    assert len(driver.received[1].tokens) == sent
    assert driver.received[1].finish == FinishCode.LENGTH


def test_prompt_without_room_for_output_is_refused_with_the_numbers() -> None:
    driver = make_driver()
    driver.admit([1, 2], [[30] * 64, [30]], max_new_tokens=1)
    assert driver.received[1].finish == FinishCode.TOO_LONG
    assert "64 tokens" in driver.received[1].message
    driver.run()
    assert driver.received[2].finish == FinishCode.LENGTH


def test_prompt_that_can_never_fit_the_pool_is_refused_with_the_numbers() -> None:
    driver = make_driver(num_pages=8, context_length=64)
    driver.admit([1, 2], [[30] * 33, [30] * 32], max_new_tokens=1)
    assert driver.received[1].finish == FinishCode.TOO_LONG
    for number in ("33", "32", "8 pages of 4"):
        assert number in driver.received[1].message
    driver.run()
    assert driver.received[2].finish == FinishCode.LENGTH


def test_request_ends_by_length_where_the_pool_ends() -> None:
    driver = make_driver(num_pages=8, context_length=64, eos_token_ids=())
    driver.admit([1], [[30] * 20], max_new_tokens=40)
    driver.run()
    # 32 slots hold all but the last of 33 tokens.
    assert len(driver.received[1].tokens) == 13
    assert driver.scheduler.max_request_tokens == 33


def test_key_in_use_is_refused() -> None:
    driver = make_driver()
    driver.admit([1], [[30]], max_new_tokens=3)
    driver.scheduler.admit(request_columns([1], [[31]]), 0.0)
    refused = driver.scheduler.drain_outputs()
    assert refused.finish.tolist() == [FinishCode.ERROR]
    assert "in use" in refused.messages[1]


class TestAbort:
    """An abort is final at once, at every stage."""

    def test_waiting_request_ends_with_no_token_and_the_running_one_goes_on(self) -> None:
        driver = make_driver(max_running_requests=1)
        driver.admit([1, 2], [[30], [40]], max_new_tokens=5)
        driver.step()
        assert driver.scheduler.abort([2, 99], driver.now) == 1
        driver.drain()
        driver.run()
        assert driver.received[2].finish == FinishCode.ABORTED
        assert driver.received[2].tokens == []
        assert driver.received[1].tokens == [31, 32, 33, 34, 35]

    @pytest.mark.parametrize("chunks", [1, 2, 7])
    @pytest.mark.parametrize("overlap", [False, True])
    def test_during_chunked_prefill_with_plans_in_flight(self, chunks: int, overlap: bool) -> None:
        driver = make_driver(chunked_prefill_size=8, overlap=overlap)
        driver.admit([2], [[35]], max_new_tokens=40)
        driver.step()
        driver.admit([1], [[30] * 50], max_new_tokens=10)
        for _ in range(chunks):
            driver.plan()
            if not overlap or driver.executor.in_flight == 2:
                driver.commit()
        before = len(driver.received[1].tokens) if 1 in driver.received else 0
        assert driver.scheduler.abort([1], driver.now) == 1
        driver.drain()
        assert driver.received[1].finish == FinishCode.ABORTED
        driver.run(after_step=driver.scheduler.audit)
        assert len(driver.received[1].tokens) == before
        assert driver.received[2].tokens == list(range(36, 76))
        stats = driver.scheduler.stats()
        assert stats.held_pages == 0

    def test_row_is_not_reused_before_its_plans_are_committed(self) -> None:
        driver = make_driver(max_running_requests=1, overlap=True)
        driver.admit([1], [[30]], max_new_tokens=10)
        driver.plan()
        driver.plan()
        driver.scheduler.abort([1], driver.now)
        driver.admit([2], [[50]], max_new_tokens=3)
        assert driver.plan() is None
        driver.commit()
        assert driver.plan() is None
        driver.commit()
        driver.run()
        assert driver.received[2].tokens == [51, 52, 53]
        assert driver.received[1].tokens == []

    def test_all(self) -> None:
        driver = make_driver(max_running_requests=2)
        driver.admit([1, 2, 3, 4], [[30]] * 4, max_new_tokens=5)
        driver.step()
        assert driver.scheduler.abort_all(driver.now) == 4
        driver.drain()
        driver.run()
        assert {received.finish for received in driver.received.values()} == {FinishCode.ABORTED}
        assert driver.scheduler.flush()


class TestTimeouts:
    """Time is an argument; the loop learns when to come back."""

    def test_waiting_limit_ends_only_what_never_ran(self) -> None:
        driver = make_driver(max_running_requests=1, waiting_timeout=1.0)
        driver.admit([1, 2], [[30], [40]], max_new_tokens=20)
        driver.step()
        assert driver.scheduler.next_deadline() == 1.0
        driver.now = 1.0
        driver.run()
        assert driver.received[2].finish == FinishCode.WAITING_TIMEOUT
        assert driver.received[1].finish == FinishCode.LENGTH

    def test_running_limit_starts_with_the_first_chunk(self) -> None:
        driver = make_driver(running_timeout=2.0)
        driver.now = 5.0
        driver.admit([1], [[30]], max_new_tokens=20)
        driver.now = 6.0
        driver.step()
        assert driver.scheduler.next_deadline() == 8.0
        driver.now = 8.0
        driver.plan()
        assert driver.received[1].finish == FinishCode.RUNNING_TIMEOUT

    def test_limit_of_the_request_counts_from_admission(self) -> None:
        driver = make_driver(max_running_requests=1)
        driver.admit([1, 2], [[30], [40]], max_new_tokens=20, timeout=[3.0, 2.0])
        driver.step()
        assert driver.scheduler.next_deadline() == 2.0
        driver.now = 2.5
        driver.step()
        assert driver.received[2].finish == FinishCode.WAITING_TIMEOUT
        driver.now = 3.5
        driver.step()
        assert driver.received[1].finish == FinishCode.RUNNING_TIMEOUT
        assert driver.scheduler.next_deadline() is None


def test_finish_from_the_front_publishes_and_sends_nothing() -> None:
    driver = make_driver(overlap=True)
    driver.admit([1], [[30] * 8], max_new_tokens=40)
    for _ in range(6):
        driver.step()
    sent = len(driver.received[1].tokens)
    driver.scheduler.finish([1], driver.now)
    driver.run()
    assert len(driver.received[1].tokens) == sent
    assert driver.received[1].finish == FinishCode.RUNNING
    assert not driver.scheduler.has_work
    stats = driver.scheduler.stats()
    assert (stats.cached_pages, stats.held_pages) == ((8 + sent - 1) // 4, 0)


def test_failed_step_ends_its_requests_only() -> None:
    driver = make_driver(overlap=False)
    driver.admit([1, 2], [[30] * 5, [40] * 5], max_new_tokens=6)
    plan = driver.plan()
    assert plan is not None
    driver.admit([3], [[50]], max_new_tokens=2)
    driver.executor.collect()
    driver.receive(driver.scheduler.fail(plan.step, "out of memory in layer 3", driver.now))
    assert [driver.received[key].finish for key in (1, 2)] == [FinishCode.ERROR] * 2
    assert driver.received[1].message == "out of memory in layer 3"
    assert driver.scheduler.stats().cached_pages == 0
    driver.run(after_step=driver.scheduler.audit)
    assert driver.received[3].tokens == [51, 52]


def test_failed_step_with_the_next_one_in_flight() -> None:
    driver = make_driver(overlap=True)
    driver.admit([1], [[30] * 5], max_new_tokens=6)
    first, second = driver.plan(), driver.plan()
    assert first is not None and second is not None
    driver.executor.collect()
    driver.receive(driver.scheduler.fail(first.step, "broken", driver.now))
    assert len(driver.commit()) == 0
    assert driver.scheduler.stats().free_pages == 128


def test_logits_that_are_not_finite_end_one_request() -> None:
    driver = make_driver(overlap=False)
    driver.admit([1, 2], [[30] * 9, [40] * 9], max_new_tokens=3)
    plan = driver.plan()
    assert plan is not None
    output = driver.executor.collect()
    tokens = output.tokens.copy()
    tokens[0] = -1
    columns = driver.scheduler.commit(StepOutput(plan.step, tokens, []), driver.now)
    driver.receive(columns)
    assert driver.received[1].finish == FinishCode.ERROR
    assert "NaN happened" in driver.received[1].message
    assert columns.token.tolist() == [-1, 41]
    driver.run(after_step=driver.scheduler.audit)
    assert driver.received[2].tokens == [41, 42, 43]
    # Only the healthy request's pages are kept.
    assert driver.scheduler.stats().cached_pages == (9 + 2) // 4


def test_result_of_another_step_is_refused() -> None:
    driver = make_driver()
    driver.admit([1], [[30]], max_new_tokens=3)
    driver.plan()
    with pytest.raises(ValueError, match="step 7"):
        driver.scheduler.commit(StepOutput(7, np.array([1], dtype=np.int32), []), 0.0)
