"""Two schedulers, one computes prompts and the other goes on: same tokens, and every page has one owner throughout."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_lite.scheduler import SchedulerConfig
from sglang_lite.types import FinishCode, Int32Array, RequestExtras, TransferParams
from tests.support.null_executor import CheckingExecutor, context_token
from tests.support.scheduler_driver import Driver, Received

VOCABULARY = 30


def config(num_pages: int, page_size: int, **values: object) -> SchedulerConfig:
    settings_of = {"max_running_requests": 4, "chunked_prefill_size": 8, "reserved_decode_tokens": 8, **values}
    return SchedulerConfig(num_pages=num_pages, page_size=page_size, context_length=96, **settings_of)  # type: ignore[arg-type]


def solo(prompt: list[int], count: int, end: int = 0) -> list[int]:
    """Tokens of a request alone."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + count:
        tokens.append(context_token(np.array(tokens, dtype=np.int32), VOCABULARY))
        if tokens[-1] == end:
            break
    return tokens[len(prompt) :]


class Pair:
    """A prefill and a decode scheduler, with the sessions between them played by this object."""

    def __init__(self, prefill: SchedulerConfig, decode: SchedulerConfig) -> None:
        self.prefill, self.decode = Driver(prefill, vocab_size=VOCABULARY), Driver(decode, vocab_size=VOCABULARY)
        self.page_size = prefill.page_size
        self.places: dict[int, Int32Array] = {}
        self.sent: dict[int, list[int]] = {}
        self.over: set[int] = set()

    def admit(self, key: int, prompt: list[int], count: int) -> None:
        extras = {0: RequestExtras(transfer=TransferParams("h", 1, key))}
        self.prefill.admit([key], [prompt], extras=extras, max_new_tokens=1)
        self.decode.admit([key], [prompt], extras=extras, max_new_tokens=count)

    def reserve(self) -> None:
        for key in self.decode.scheduler.held():
            if key not in self.places:
                pages = self.decode.scheduler.reserve_incoming(key)
                if pages is None:
                    return
                self.places[key] = pages.copy()
                self.sent[key] = []

    def ready(self, key: int) -> None:
        if key in self.places:
            self.prefill.scheduler.release_held(key, lent=True)

    def send(self) -> None:
        for written in self.prefill.scheduler.take_written():
            sent = self.sent[written.key]
            assert written.first_page == len(sent)
            sent += written.pages.tolist()

    def deliver(self, key: int) -> None:
        """All of a prompt is computed: copy its pages over, as late as this, and let both sides know."""
        received = self.prefill.received[key]
        source, target = self.prefill.executor, self.decode.executor
        assert isinstance(source, CheckingExecutor) and isinstance(target, CheckingExecutor)
        assert len(self.sent[key]) == len(self.places[key])
        for page, place in zip(self.sent[key], self.places[key].tolist(), strict=True):
            for name in ("_slot_token", "_slot_position"):
                content = getattr(source, name)[page * self.page_size : (page + 1) * self.page_size]
                getattr(target, name)[place * self.page_size : (place + 1) * self.page_size] = content
        self.prefill.scheduler.release_hold(key)
        code = received.finish if received.finish == FinishCode.STOP_TOKEN else FinishCode.RUNNING
        self.decode.scheduler.join(key, received.tokens[0], code, received.matched, 0, [], self.decode.now)
        self.decode.drain()

    def audit(self) -> None:
        self.prefill.scheduler.audit()
        self.decode.scheduler.audit()

    def computed(self) -> list[int]:
        """Prompts that are computed and were neither delivered nor given up."""
        done = (FinishCode.LENGTH, FinishCode.STOP_TOKEN)
        received = self.prefill.received
        return [key for key in self.places if key not in self.over and received.get(key, Received()).finish in done]


def free_pages(driver: Driver) -> int:
    stats = driver.scheduler.stats()
    return stats.free_pages + stats.cached_pages


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**9), page_size=st.sampled_from([1, 4, 16]), cached=st.booleans(), overlap=st.booleans())
def test_any_order_of_events(seed: int, page_size: int, cached: bool, overlap: bool) -> None:
    """Late transfers, aborts and failures on either side, preemptions: tokens as alone, pages owned once."""
    dice = random.Random(seed)
    least = -(-96 // page_size)
    limits = {"eos_token_ids": (0,), "overlap": overlap}
    pair = Pair(
        config(least + dice.randrange(2 * least), page_size, enable_radix_cache=cached, **limits),
        config(least + dice.randrange(least), page_size, enable_radix_cache=False, **limits),
    )
    prompts = {key: [dice.randrange(3) for _ in range(dice.randint(1, 40))] for key in range(1, 9)}
    counts = {key: dice.choice([1, 2, 9, 30]) for key in prompts}
    waiting, quarantined, given_up = list(prompts), set[int](), set[int]()
    for _ in range(4000):
        match dice.randrange(12):
            case 0 if waiting:
                key = waiting.pop()
                pair.admit(key, prompts[key], counts[key])
            case 1:
                pair.reserve()
            case 2 if pair.places:
                pair.ready(dice.choice(list(pair.places)))
            case 3 if pair.computed():
                key = dice.choice(pair.computed())
                pair.over.add(key)
                pair.deliver(key)
            case 4 if dice.random() < 0.05:
                key = dice.choice(list(prompts))
                if key not in waiting:
                    driver = dice.choice([pair.prefill, pair.decode])
                    given_up |= {key}
                    driver.scheduler.abort([key], driver.now)
                    driver.drain()
            case 5 if dice.random() < 0.02:
                driver = dice.choice([pair.prefill, pair.decode])
                driver.scheduler.pause("retract", driver.now)
                while driver.executor.in_flight:
                    driver.commit()
                driver.scheduler.resume()
            case _:
                driver = dice.choice([pair.prefill, pair.decode])
                driver.step()
        pair.send()
        # One side's end ends the other's session; the pages stay where they are until the peer is quiet.
        for here, there in ((pair.prefill, pair.decode), (pair.decode, pair.prefill)):
            for key in here.scheduler.take_ended():
                received = here.received[key]
                if received.finish in (FinishCode.ABORTED, FinishCode.ERROR):
                    pair.over.add(key)
                    there.scheduler.fail_request(key, FinishCode.ERROR, "the peer ended it", there.now)
                    there.drain()
                    quarantined.add(key)
        if quarantined and dice.random() < 0.2:
            key = quarantined.pop()
            pair.prefill.scheduler.release_hold(key)
            pair.decode.scheduler.release_hold(key)
        pair.audit()
        if (
            not waiting
            and not pair.prefill.scheduler.stats().num_waiting
            and all(pair.decode.received.get(key, Received()).finish for key in prompts)
        ):
            break
    for key in prompts:
        pair.prefill.scheduler.release_hold(key)
        pair.decode.scheduler.release_hold(key)
    for driver in (pair.prefill, pair.decode):
        driver.run()
        driver.scheduler.audit()
        assert free_pages(driver) == driver.scheduler.config.num_pages
    for key, prompt in prompts.items():
        received, expected = pair.decode.received[key], solo(prompt, counts[key])
        if received.finish in (FinishCode.ABORTED, FinishCode.ERROR):
            assert key in given_up
            assert received.tokens == expected[: len(received.tokens)]
        else:
            assert received.tokens == expected


def test_held_pages_outlive_their_request() -> None:
    """An abort while pages are lent frees nothing until the peer is quiet."""
    pair = Pair(config(16, 4), config(16, 4))
    pair.admit(1, list(range(1, 11)), 5)
    pair.reserve()
    assert free_pages(pair.decode) == 13
    pair.decode.scheduler.abort([1], 0.0)
    assert free_pages(pair.decode) == 13
    assert not pair.decode.scheduler.flush()
    assert pair.decode.scheduler.take_ended() == [1]
    assert pair.decode.scheduler.release_hold(1)
    assert free_pages(pair.decode) == 16
    assert pair.decode.scheduler.flush()


def test_pages_are_kept_for_running_requests() -> None:
    """Each running or reserved request keeps its share free; the first one always finds room."""
    pair = Pair(config(16, 4), config(7, 4, reserved_decode_tokens=8))
    pair.admit(1, [1] * 8, 5)
    pair.admit(2, [2] * 8, 5)
    pair.reserve()
    assert list(pair.places) == [1]  # 3 pages are taken, and 2 of the other 4 stay free for it


def test_a_held_request_counts_and_times_out() -> None:
    driver = Driver(config(16, 4, max_queued_requests=0, max_running_requests=1, waiting_timeout=5.0))
    extras = {0: RequestExtras(transfer=TransferParams("h", 1, 1))}
    driver.admit([1], [[1, 2]], extras=extras)
    driver.admit([2], [[1, 2]], extras=extras)
    assert driver.received[2].finish == FinishCode.QUEUE_FULL
    assert not driver.scheduler.has_work
    assert driver.scheduler.next_deadline() == 5.0
    driver.now = 5.0
    assert driver.plan() is None
    assert driver.received[1].finish == FinishCode.WAITING_TIMEOUT


@pytest.mark.parametrize("count", [1, 3])
def test_computed_here_when_there_is_no_peer(count: int) -> None:
    driver = Driver(config(16, 4), vocab_size=VOCABULARY)
    driver.admit([1], [[1, 2, 3]], extras={0: RequestExtras(transfer=TransferParams("h", 1, 1))}, max_new_tokens=count)
    assert driver.plan() is None
    assert driver.scheduler.reserve_incoming(1) is not None
    assert driver.scheduler.release_held(1, lent=False)
    driver.scheduler.audit()
    assert driver.scheduler.release_hold(1)
    driver.run()
    assert driver.received[1].tokens == solo([1, 2, 3], count, end=-1)
    assert not driver.scheduler.take_ended()
    driver.scheduler.audit()
