"""Batching: token budgets, order of admission, policies, the batching window."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sglang_lite.scheduler import Policy, SchedulerConfig
from sglang_lite.types import FinishCode
from tests.support.null_executor import NullExecutor
from tests.support.scheduler_driver import Driver


def make_driver(**changes: Any) -> Driver:
    values: dict[str, Any] = {
        "num_pages": 512,
        "page_size": 4,
        "context_length": 256,
        "max_running_requests": 8,
        "overlap": False,
    }
    config = SchedulerConfig(**(values | changes))
    return Driver(config, NullExecutor(config.max_running_requests))


def prompt(start: int, length: int) -> list[int]:
    return list(range(start, start + length))


def test_decode_rows_come_before_prefill_chunks_in_one_plan() -> None:
    driver = make_driver()
    driver.admit([1], [prompt(100, 5)], max_new_tokens=8)
    driver.step()
    driver.admit([2], [prompt(200, 6)], max_new_tokens=8)
    plan = driver.plan()
    assert plan is not None
    assert plan.num_decode == 1
    assert plan.query_lens.tolist() == [1, 6]
    assert plan.input_ids.tolist() == [-1, *prompt(200, 6)]
    assert plan.positions.tolist() == [5, 0, 1, 2, 3, 4, 5]
    assert plan.kv_lens.tolist() == [6, 6]
    assert plan.sample_index.tolist() == [0, 1]
    assert plan.generated.tolist() == [1, 0]


def test_prompt_is_cut_into_chunks_of_the_budget_shared_with_decode_rows() -> None:
    driver = make_driver(chunked_prefill_size=16)
    driver.admit([1], [prompt(100, 4)], max_new_tokens=30)
    driver.step()
    driver.admit([2], [prompt(200, 40)], max_new_tokens=1)
    sizes: list[int] = []
    while driver.received.get(2, driver.received[1]).finish == FinishCode.RUNNING and len(sizes) < 5:
        plan = driver.plan()
        assert plan is not None
        sizes.append(int(plan.query_lens[plan.num_decode :].sum()))
        driver.commit()
        if 2 in driver.received:
            break
    assert sizes == [15, 15, 10]
    # The other request drew a token in every one of these steps.
    assert len(driver.received[1].tokens) == 4


def test_prefill_keeps_a_share_when_decode_rows_fill_the_budget() -> None:
    driver = make_driver(chunked_prefill_size=4)
    driver.admit([1, 2, 3, 4], [prompt(100 * key, 1) for key in range(1, 5)], max_new_tokens=100)
    driver.step()
    driver.admit([5], [prompt(900, 3)], max_new_tokens=2)
    for _ in range(5):
        driver.step()
    assert driver.received[5].finish == FinishCode.LENGTH


def test_first_tokens_keep_the_order_of_arrival_under_a_prefill_budget() -> None:
    driver = make_driver(max_prefill_tokens=8)
    driver.admit([1, 2, 3], [prompt(100 * key, 6) for key in (1, 2, 3)], max_new_tokens=3)
    driver.run()
    assert driver.first_tokens == [1, 2, 3]
    assert [len(plan.query_lens) - plan.num_decode for plan in driver.plans[:3]] == [1, 1, 1]
    assert all(received.finish == FinishCode.LENGTH for received in driver.received.values())


def test_prefill_budget_counts_only_uncached_tokens_and_always_takes_the_first() -> None:
    driver = make_driver(max_prefill_tokens=8)
    shared = prompt(500, 32)
    driver.admit([1], [shared], max_new_tokens=1)
    driver.run()
    assert driver.received[1].finish == FinishCode.LENGTH
    driver.admit([2, 3], [[*shared, 7, 8], [*shared, 9, 10]], max_new_tokens=1)
    plan = driver.plan()
    assert plan is not None
    assert plan.query_lens.tolist() == [2, 2]


def test_prefill_max_requests_limits_a_step() -> None:
    driver = make_driver(prefill_max_requests=2)
    driver.admit([1, 2, 3], [prompt(100 * key, 6) for key in (1, 2, 3)], max_new_tokens=3)
    plan = driver.plan()
    assert plan is not None
    assert len(plan.rows) == 2


def test_max_running_requests_holds_the_rest_back() -> None:
    driver = make_driver(max_running_requests=2)
    driver.admit(range(1, 6), [prompt(100 * key, 6) for key in range(1, 6)], max_new_tokens=3)
    driver.plan()
    stats = driver.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_waiting_tokens) == (2, 3, 18)
    driver.run()
    assert {key: len(received.tokens) for key, received in driver.received.items()} == dict.fromkeys(range(1, 6), 3)


def test_queue_limit_counts_beyond_free_rows() -> None:
    driver = make_driver(max_running_requests=2, max_queued_requests=1)
    driver.admit([1, 2, 3, 4], [prompt(100, 4)] * 4, max_new_tokens=2)
    assert driver.received[4].finish == FinishCode.QUEUE_FULL
    assert driver.received[4].message == "The request queue is full."
    driver.run()
    assert [driver.received[key].finish for key in (1, 2, 3)] == [FinishCode.LENGTH] * 3


@pytest.mark.parametrize(("low_first", "order"), [(False, [3, 2, 1]), (True, [1, 2, 3])])
def test_priority_policy(low_first: bool, order: list[int]) -> None:
    driver = make_driver(policy="priority", low_priority_first=low_first, max_running_requests=1)
    driver.admit([1, 2, 3], [prompt(100 * key, 4) for key in (1, 2, 3)], max_new_tokens=2, priority=[1, 2, 3])
    driver.run()
    assert driver.first_tokens == order


def test_priority_cannot_starve_a_request_for_ever() -> None:
    driver = make_driver(policy="priority", max_running_requests=1, starvation_limit=3)
    driver.admit([1], [prompt(100, 4)], max_new_tokens=1, priority=0)
    for key in range(2, 12):
        driver.admit([key], [prompt(100 * key, 4)], max_new_tokens=1, priority=5)
    driver.run()
    assert driver.first_tokens.index(1) == 3


def test_longest_prefix_goes_first_with_lpm() -> None:
    driver = make_driver(policy="lpm", max_running_requests=1)
    shared = prompt(500, 32)
    driver.admit([1], [shared], max_new_tokens=1)
    driver.run()
    driver.admit([2, 3, 4], [prompt(100, 40), [*shared[:16], 1, 2], [*shared, 3]], max_new_tokens=1)
    driver.run()
    assert driver.first_tokens == [1, 4, 3, 2]


@pytest.mark.parametrize("policy", ["fcfs", "lpm", "priority"])
def test_a_queue_that_is_never_empty_is_served_for_ever(policy: Policy) -> None:
    """More requests come and go than any policy looks at together."""
    driver = make_driver(policy=policy, max_running_requests=2)
    driver.admit(range(300), [prompt(10 * key, 5) for key in range(300)], max_new_tokens=1)
    driver.run()
    assert sorted(driver.first_tokens) == list(range(300))


class TestBatchingWindow:
    """An idle scheduler gathers requests for a bounded time."""

    def test_requests_that_arrive_together_start_together(self) -> None:
        driver = make_driver(max_wait_ms=10)
        for key in range(1, 8):
            driver.now = key * 0.001
            driver.admit([key], [prompt(100 * key, 4)], max_new_tokens=2)
            assert driver.plan() is None
            assert not driver.scheduler.has_work
            assert driver.scheduler.next_deadline() == pytest.approx(0.011)
        # The batch is full with the eighth: nothing is gained by waiting on.
        driver.admit([8], [prompt(800, 4)], max_new_tokens=2)
        assert driver.scheduler.has_work
        plan = driver.plan()
        assert plan is not None
        assert len(plan.rows) == 8
        assert driver.scheduler.stats().prefill_batches == 1

    def test_a_request_alone_starts_when_the_window_closes(self) -> None:
        driver = make_driver(max_wait_ms=10)
        driver.now = 5.0
        driver.admit([1], [prompt(100, 4)], max_new_tokens=2)
        driver.now = 5.0099
        assert driver.plan() is None
        driver.now = 5.01
        assert driver.plan() is not None

    def test_a_paused_scheduler_does_not_ask_to_be_woken_for_the_window(self) -> None:
        driver = make_driver(max_wait_ms=10)
        driver.admit([1], [prompt(100, 4)], max_new_tokens=2)
        assert driver.plan() is None
        driver.scheduler.pause("in_place", 0.001)
        driver.now = 0.5
        assert driver.plan() is None
        assert driver.scheduler.next_deadline() is None, "the engine would spin until the pause ends"
        driver.scheduler.resume()
        driver.run()
        assert len(driver.received[1].tokens) == 2

    def test_nothing_waits_while_others_run(self) -> None:
        driver = make_driver(max_wait_ms=10)
        driver.admit([1], [prompt(100, 4)], max_new_tokens=5)
        driver.now = 0.01
        driver.step()
        driver.admit([2], [prompt(200, 4)], max_new_tokens=5)
        plan = driver.plan()
        assert plan is not None
        assert len(plan.rows) == 2


def test_overlap_plans_two_steps_ahead_of_the_tokens() -> None:
    driver = make_driver(overlap=True)
    driver.admit([1], [prompt(100, 4)], max_new_tokens=5)
    first, second, third = driver.plan(), driver.plan(), driver.plan()
    assert first is not None and second is not None and third is None
    assert second.num_decode == 1
    assert second.rows.tolist() == first.rows.tolist()
    assert second.positions.tolist() == [4]
    driver.run()
    assert driver.received[1].tokens == [104, 105, 106, 107, 108]


def test_no_plan_goes_beyond_the_output_limit() -> None:
    driver = make_driver(overlap=True)
    driver.admit([1, 2], [prompt(100, 4), prompt(200, 4)], max_new_tokens=[2, 5])
    driver.run()
    assert sum(len(plan.sample_index) for plan in driver.plans) == 7


def test_sampling_columns_are_the_same_object_while_the_rows_are() -> None:
    driver = make_driver(overlap=True)
    driver.admit([1, 2], [prompt(100, 4), prompt(200, 4)], max_new_tokens=[3, 9])
    driver.run()
    identities = [id(plan.sampling) for plan in driver.plans]
    assert len(set(identities[:3])) == 1
    assert len(set(identities)) == 2


def test_many_chunks_without_decode_rows_have_page_tables_of_their_own_width() -> None:
    driver = make_driver(chunked_prefill_size=4)
    driver.admit([1], [prompt(100, 64)], max_new_tokens=1)
    driver.run()
    assert [plan.page_table.shape for plan in driver.plans] == [(1, width) for width in range(1, 17)]
    driver.admit([2], [prompt(900, 3)], max_new_tokens=1)
    plan = driver.plan()
    assert plan is not None
    assert plan.page_table.shape == (1, 1)


def test_plan_is_none_without_requests() -> None:
    driver = make_driver()
    assert driver.plan() is None
    assert not driver.scheduler.has_work
    assert driver.scheduler.next_deadline() is None


def test_same_calls_lead_to_the_same_plans() -> None:
    def play() -> list[list[int]]:
        driver = make_driver(chunked_prefill_size=16, num_pages=80, overlap=True, max_running_requests=4)
        random = np.random.default_rng(3)
        for key in range(1, 20):
            driver.admit([key], [prompt(int(random.integers(1, 9)), int(random.integers(1, 60)))], max_new_tokens=20)
            driver.step()
        driver.run()
        return [[plan.step, *plan.rows.tolist(), *plan.slot_mapping.tolist()] for plan in driver.plans]

    assert play() == play()
