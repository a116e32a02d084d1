"""Prefix reuse, publication, preemption, pause and flush, on a simulated pool that detects any wrong page."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sglang_lite.scheduler import SchedulerConfig
from sglang_lite.types import FinishCode, RequestExtras, RequestFlags
from tests.support.null_executor import context_token
from tests.support.scheduler_driver import Driver

VOCABULARY = 1000


def make_driver(**changes: Any) -> Driver:
    values: dict[str, Any] = {
        "num_pages": 64,
        "page_size": 16,
        "context_length": 512,
        "max_running_requests": 8,
    }
    return Driver(SchedulerConfig(**(values | changes)), vocab_size=VOCABULARY)


def solo(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(context_token(np.array(tokens, dtype=np.int32), VOCABULARY))
    return tokens[len(prompt) :]


@pytest.mark.parametrize(("page_size", "cached"), [(1, 40), (16, 32), (4, 40), (64, 0)])
@pytest.mark.parametrize("overlap", [False, True])
def test_repeated_prompt_hits(page_size: int, cached: int, overlap: bool) -> None:
    driver = make_driver(page_size=page_size, num_pages=1024 // page_size, overlap=overlap)
    prompt = list(range(1, 41))
    for key in (1, 2, 3):
        driver.admit([key], [prompt], max_new_tokens=10)
        driver.run(after_step=driver.scheduler.audit)
        assert driver.received[key].tokens == solo(prompt, 10)
    assert [driver.received[key].cached_tokens for key in (1, 2, 3)] == [0, cached, cached]


@pytest.mark.parametrize(("page_size", "num_pages"), [(1, 8), (4, 4), (16, 2), (16, 1)])
def test_fully_cached_prompt_that_fills_the_pool_runs_again(page_size: int, num_pages: int) -> None:
    """There is no page for the copy: the last one is given up and computed again, instead of waiting for ever."""
    driver = make_driver(page_size=page_size, num_pages=num_pages)
    prompt = list(range(1, page_size * num_pages + 1))
    for key in (1, 2):
        driver.admit([key], [prompt], max_new_tokens=1)
        driver.run(after_step=driver.scheduler.audit)
    assert driver.received[1].tokens == driver.received[2].tokens == solo(prompt, 1)
    assert driver.received[2].finish == FinishCode.LENGTH
    assert driver.received[2].cached_tokens == page_size * (num_pages - 1)


def test_fully_cached_prompt_computes_one_token_on_a_copy_of_its_last_page() -> None:
    driver = make_driver()
    prompt = list(range(1, 49))
    driver.admit([1], [prompt], max_new_tokens=3)
    driver.run()
    driver.admit([2], [prompt], max_new_tokens=3)
    plan = driver.plan()
    assert plan is not None
    assert plan.query_lens.tolist() == [1]
    assert plan.positions.tolist() == [47]
    (source, destination) = plan.page_copies[0].tolist()
    assert plan.page_table[0, 2] == destination != source
    driver.run(after_step=driver.scheduler.audit)
    assert driver.received[2].tokens == solo(prompt, 3)
    assert driver.received[2].cached_tokens == 48


def test_only_the_common_whole_pages_are_reused() -> None:
    driver = make_driver(page_size=4)
    driver.admit([1], [[1, 2, 3, 4, 5, 6, 7, 8]], max_new_tokens=2)
    driver.run()
    driver.admit([2], [[1, 2, 3, 4, 90, 91, 92, 93]], max_new_tokens=2)
    driver.run()
    assert driver.received[2].cached_tokens == 4


def test_follow_up_turns_hit_prompt_and_output() -> None:
    driver = make_driver(page_size=4, num_pages=256)
    conversation = list(range(1, 12))
    previous = 0
    for turn in range(5):
        driver.admit([turn], [conversation], max_new_tokens=9)
        driver.run(after_step=driver.scheduler.audit)
        # Everything of the turn before except the last token, which was never fed, and the partial page.
        assert driver.received[turn].cached_tokens == max(previous - 1, 0) // 4 * 4
        previous = len(conversation) + 9
        conversation = conversation + driver.received[turn].tokens + [500 + turn, 600 + turn]


def test_namespaces_share_nothing() -> None:
    driver = make_driver()
    prompt = list(range(1, 41))
    for key, namespace in ((1, "a"), (2, "b"), (3, "a")):
        driver.admit([key], [prompt], max_new_tokens=2, extras={0: RequestExtras(namespace=namespace)})
        driver.run()
    assert [driver.received[key].cached_tokens for key in (1, 2, 3)] == [0, 0, 32]


def test_disabled_cache_reuses_nothing_and_returns_every_page() -> None:
    driver = make_driver(enable_radix_cache=False)
    prompt = list(range(1, 41))
    for key in (1, 2):
        driver.admit([key], [prompt], max_new_tokens=5)
        driver.run(after_step=driver.scheduler.audit)
        assert driver.received[key].cached_tokens == 0
        assert driver.scheduler.stats().free_pages == 64


def test_prompt_is_published_when_its_prefill_is_committed() -> None:
    driver = make_driver(overlap=True)
    prompt = list(range(1, 41))
    driver.admit([1], [prompt], max_new_tokens=50)
    driver.step()
    driver.admit([2], [prompt], max_new_tokens=5)
    driver.run(after_step=driver.scheduler.audit)
    assert driver.received[2].cached_tokens == 32
    assert driver.received[2].tokens == solo(prompt, 5)


def test_prompts_computed_side_by_side_end_up_on_the_same_pages() -> None:
    driver = make_driver(overlap=True)
    prompt = list(range(1, 49))
    driver.admit([1, 2, 3], [prompt] * 3, max_new_tokens=30)
    for _ in range(3):
        driver.step()
        driver.scheduler.audit()
    stats = driver.scheduler.stats()
    assert stats.cached_pages == 3
    assert stats.held_pages == 3
    driver.run(after_step=driver.scheduler.audit)
    assert all(driver.received[key].tokens == solo(prompt, 30) for key in (1, 2, 3))


@pytest.mark.parametrize("overlap", [False, True])
def test_requests_with_a_long_common_prefix_compute_it_once(overlap: bool) -> None:
    driver = make_driver(overlap=overlap, num_pages=128, chunked_prefill_size=100)
    shared = [position % 11 for position in range(256)]
    prompts = [shared + [500 + key] * 20 for key in range(6)]
    driver.admit(range(6), prompts, max_new_tokens=4)
    driver.run(after_step=driver.scheduler.audit)
    stats = driver.scheduler.stats()
    assert stats.computed_prompt_tokens == 256 + 6 * 20
    assert [driver.received[key].cached_tokens for key in range(6)] == [0] + [256] * 5
    assert driver.first_tokens == list(range(6))
    assert all(driver.received[key].tokens == solo(prompts[key], 4) for key in range(6))


def test_request_stops_waiting_for_a_prefix_whose_prefill_is_aborted() -> None:
    driver = make_driver(num_pages=128, chunked_prefill_size=64)
    shared = [position % 11 for position in range(256)]
    driver.admit([1, 2], [[*shared, 1], [*shared, 2]], max_new_tokens=2)
    driver.step()
    assert driver.scheduler.stats().num_waiting == 1
    driver.scheduler.abort([1], driver.now)
    driver.run(after_step=driver.scheduler.audit)
    assert driver.received[2].tokens == solo([*shared, 2], 2)


class TestLogprobs:
    """Prompt log-probabilities need the positions before them computed, so they limit the prefix that is reused."""

    @pytest.mark.parametrize(("start", "cached"), [(0, 0), (1, 0), (16, 0), (17, 16), (33, 32), (47, 32), (-1, 48)])
    def test_reuse_stops_before_the_first_scored_position(self, start: int, cached: int) -> None:
        driver = make_driver(chunked_prefill_size=10)
        prompt = list(range(1, 49))
        driver.admit([1], [prompt], max_new_tokens=2)
        driver.run()
        flags = int(RequestFlags.RETURN_LOGPROB)
        driver.admit([2], [prompt], max_new_tokens=3, flags=flags, logprob_start=start, top_logprobs=2)
        driver.run(after_step=driver.scheduler.audit)
        received = driver.received[2]
        assert received.cached_tokens == cached
        scored = [token for record in received.logprobs if record.prompt for token in record.token_ids.tolist()]
        assert scored == (prompt[start:] if start >= 0 else [])
        values = [value for record in received.logprobs if record.prompt for value in record.logprobs.tolist()]
        expected = [-float(token) for token in scored]
        assert values[1:] == expected[1:]
        if start >= 0:
            assert np.isnan(values[0]) if start == 0 else values[0] == expected[0]
        outputs = [token for record in received.logprobs if not record.prompt for token in record.token_ids.tolist()]
        assert outputs == received.tokens

    def test_each_position_is_reported_once_across_a_preemption(self) -> None:
        driver = make_driver(page_size=1, num_pages=80, chunked_prefill_size=16)
        prompts = [list(range(1, 31)), list(range(101, 131))]
        flags = int(RequestFlags.RETURN_LOGPROB)
        driver.admit([1, 2], prompts, max_new_tokens=40, flags=flags, logprob_start=5)
        driver.run(after_step=driver.scheduler.audit)
        assert driver.scheduler.stats().retractions > 0
        for key, prompt in zip((1, 2), prompts, strict=True):
            records = driver.received[key].logprobs
            scored = [token for record in records if record.prompt for token in record.token_ids.tolist()]
            drawn = [token for record in records if not record.prompt for token in record.token_ids.tolist()]
            assert scored == prompt[5:]
            assert drawn == driver.received[key].tokens == solo(prompt, 40)

    def test_prefill_only_scores_the_prompt(self) -> None:
        driver = make_driver()
        driver.admit([1], [list(range(1, 21))], max_new_tokens=0, flags=2, logprob_start=0)
        driver.run()
        scored = [token for record in driver.received[1].logprobs for token in record.token_ids.tolist()]
        assert scored == list(range(1, 21))


class TestPreemption:
    """A pool that is too small for all: nobody loses or repeats a token."""

    @pytest.mark.parametrize("page_size", [1, 4, 16])
    @pytest.mark.parametrize("cache", [True, False])
    @pytest.mark.parametrize("overlap", [True, False])
    def test_two_requests_that_exceed_the_pool_together_both_complete(
        self, page_size: int, cache: bool, overlap: bool
    ) -> None:
        driver = make_driver(
            page_size=page_size, num_pages=64 // page_size, enable_radix_cache=cache, overlap=overlap, context_length=64
        )
        prompts = [list(range(1, 31)), list(range(101, 131))]
        driver.admit([1, 2], prompts, max_new_tokens=20)
        driver.run(after_step=driver.scheduler.audit)
        for key, prompt in zip((1, 2), prompts, strict=True):
            assert driver.received[key].tokens == solo(prompt, 20)
            assert driver.received[key].finish == FinishCode.LENGTH
        assert driver.first_tokens == [1, 2]

    def test_the_latest_goes_first_and_the_oldest_never(self) -> None:
        driver = make_driver(page_size=4, num_pages=24, context_length=96)
        prompts = [[key * 100 + position for position in range(8)] for key in range(1, 5)]
        driver.admit([1, 2, 3, 4], prompts, max_new_tokens=40)
        driver.run(after_step=driver.scheduler.audit)
        retractions = [driver.received[key].retractions for key in (1, 2, 3, 4)]
        assert retractions[0] == 0
        assert retractions[3] > 0
        assert driver.scheduler.stats().retractions == sum(retractions)
        for key, prompt in zip((1, 2, 3, 4), prompts, strict=True):
            assert driver.received[key].tokens == solo(prompt, 40)

    def test_the_least_urgent_goes_first_with_priorities(self) -> None:
        driver = make_driver(page_size=4, num_pages=24, context_length=96, policy="priority")
        prompts = [[key * 100 + position for position in range(8)] for key in range(1, 5)]
        driver.admit([1, 2, 3, 4], prompts, max_new_tokens=40, priority=[0, 5, 6, 7])
        driver.run(after_step=driver.scheduler.audit)
        assert driver.received[1].retractions > 0
        assert driver.received[4].retractions == 0

    def test_penalty_counts_are_rebuilt_when_a_row_resumes(self) -> None:
        driver = make_driver(page_size=1, num_pages=80)
        prompts = [list(range(1, 31)), list(range(101, 131))]
        driver.admit([1, 2], prompts, max_new_tokens=40, presence_penalty=0.5)
        driver.run()
        resumed = [counts.tolist() for plan in driver.plans for counts in plan.resumed.values()]
        assert resumed[:2] == [[], []]
        assert len(resumed) == 2 + driver.scheduler.stats().retractions
        assert all(counts == solo(prompts[1], len(counts)) for counts in resumed[2:])


class TestPauseAndFlush:
    """Pausing keeps, takes or ends; flushing needs an idle scheduler."""

    def test_in_place_keeps_everything(self) -> None:
        driver = make_driver()
        prompts = [[key * 20 + position for position in range(10)] for key in range(8)]
        driver.admit(range(8), prompts, max_new_tokens=20)
        driver.step()
        driver.scheduler.pause("in_place", driver.now)
        driver.run()
        held = driver.scheduler.stats().held_pages
        assert held > 0
        assert driver.plan() is None
        assert not driver.scheduler.has_work
        driver.scheduler.resume()
        driver.run(after_step=driver.scheduler.audit)
        assert all(driver.received[key].tokens == solo(prompts[key], 20) for key in range(8))
        assert driver.scheduler.stats().retractions == 0

    def test_retract_waits_for_steps_in_flight_and_resumes_with_the_same_output(self) -> None:
        driver = make_driver(overlap=True)
        prompts = [[key * 20 + position for position in range(40)] for key in range(3)]
        driver.admit(range(3), prompts, max_new_tokens=20)
        for _ in range(4):
            driver.step()
        assert driver.executor.in_flight == 1
        driver.scheduler.pause("retract", driver.now)
        assert driver.scheduler.stats().num_running == 3
        driver.run(after_step=driver.scheduler.audit)
        stats = driver.scheduler.stats()
        assert (stats.num_running, stats.num_pending, stats.held_pages) == (0, 3, 0)
        assert driver.scheduler.flush(), "new weights come in such a pause: what was computed with the old ones goes"
        assert driver.scheduler.stats().free_pages == 64
        driver.scheduler.resume()
        driver.run(after_step=driver.scheduler.audit)
        for key in range(3):
            assert driver.received[key].tokens == solo(prompts[key], 20)
            assert driver.received[key].cached_tokens == 0

    def test_abort_ends_all(self) -> None:
        driver = make_driver()
        driver.admit([1, 2], [[1, 2], [3, 4]], max_new_tokens=20)
        driver.step()
        driver.scheduler.pause("abort", driver.now)
        driver.drain()
        driver.run()
        assert {received.finish for received in driver.received.values()} == {FinishCode.ABORTED}

    def test_flush_is_refused_while_anything_is_live_and_exact_afterwards(self) -> None:
        driver = make_driver(overlap=True)
        prompt = list(range(1, 41))
        driver.admit([1], [prompt], max_new_tokens=4)
        assert not driver.scheduler.flush()
        while driver.step():
            if driver.scheduler.has_work:
                assert not driver.scheduler.flush()
        assert driver.scheduler.flush()
        assert driver.scheduler.stats().free_pages == 64
        driver.admit([2], [prompt], max_new_tokens=4)
        driver.run()
        assert driver.received[2].cached_tokens == 0


def test_maintenance_frees_pages_in_bounded_slices_before_the_pool_is_empty() -> None:
    driver = make_driver(page_size=4, num_pages=100, free_page_watermark=0.2, context_length=384)
    driver.admit([1], [list(range(1, 371))], max_new_tokens=4)
    driver.run()
    assert driver.scheduler.stats().free_pages == 7
    slices = []
    while freed := driver.scheduler.maintain(5):
        slices.append(freed)
        driver.scheduler.audit()
    assert slices == [5, 5, 3]
    stats = driver.scheduler.stats()
    assert (stats.free_pages, stats.evicted_tokens) == (20, 52)


def test_cached_pages_give_way_to_new_requests() -> None:
    driver = make_driver(page_size=4, num_pages=32, context_length=128)
    for key in range(12):
        prompt = [key * 50 + position for position in range(40)]
        driver.admit([key], [prompt], max_new_tokens=10)
        driver.run(after_step=driver.scheduler.audit)
        assert driver.received[key].tokens == solo(prompt, 10)
    stats = driver.scheduler.stats()
    assert stats.evicted_tokens > 0
    assert stats.retractions == 0


def test_long_prefill_in_chunks_leaves_the_others_decoding_and_the_output_unchanged() -> None:
    driver = make_driver(chunked_prefill_size=32, num_pages=128, context_length=1024)
    long_prompt = [position % 7 for position in range(600)]
    driver.admit([1], [[5, 6]], max_new_tokens=60)
    driver.step()
    driver.admit([2], [long_prompt], max_new_tokens=8)
    driver.run(after_step=driver.scheduler.audit)
    assert driver.received[1].tokens == solo([5, 6], 60)
    assert driver.received[2].tokens == solo(long_prompt, 8)
    assert all(len(plan.input_ids) <= 32 + 1 for plan in driver.plans)
    assert all(plan.num_decode == 1 for plan in driver.plans[1:15])
