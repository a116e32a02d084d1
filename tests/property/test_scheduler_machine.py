"""The scheduler against a naive model: batching, chunks, cache hits, preemption and aborts never change an output."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from sglang_lite.scheduler import SchedulerConfig, sharing
from sglang_lite.types import FinishCode, RequestExtras, RequestFlags
from tests.support.null_executor import allowed_token, context_token
from tests.support.scheduler_driver import Driver

VOCABULARY = 30
END_TOKEN = 0
CONTEXT = 96


@dataclass
class Expected:
    """A request as the naive model sees it."""

    prompt: list[int]
    max_new_tokens: int
    min_new_tokens: int
    ignore_eos: bool
    stop_tokens: tuple[int, ...]
    solo: list[int] = field(default_factory=list)
    code: FinishCode = FinishCode.LENGTH
    ended_early: bool = False
    sent_at_end: int = 0


def solo_run(request: Expected) -> None:
    """Output and finish code of the request alone, one token at a time."""
    tokens = list(request.prompt)
    stops = () if request.ignore_eos else (END_TOKEN, *request.stop_tokens)
    suppressed = (END_TOKEN, *(() if request.ignore_eos else request.stop_tokens))
    while len(request.solo) < request.max_new_tokens:
        token = context_token(np.array(tokens, dtype=np.int32), VOCABULARY)
        if len(request.solo) < request.min_new_tokens:
            token = allowed_token(token, suppressed, VOCABULARY)
        tokens.append(token)
        request.solo.append(token)
        if token in stops:
            request.code = FinishCode.STOP_TOKEN
            break


class SchedulerMachine(RuleBasedStateMachine):
    """Random engine loops over a small pool, with every slot of the pool simulated."""

    page_sizes: tuple[int, ...] = (1, 4, 16, 64)
    draft_tokens: tuple[int, ...] = (0,)
    executor_drafts = False

    def __init__(self) -> None:
        super().__init__()
        self.expected: dict[int, Expected] = {}
        self.next_key = 1
        self.paused = ""

    @initialize(data=st.data())
    def start(self, data: st.DataObject) -> None:
        page_size = data.draw(st.sampled_from(self.page_sizes))
        least = -(-CONTEXT // page_size)
        draft_tokens = data.draw(st.sampled_from(self.draft_tokens))
        self.config = SchedulerConfig(
            num_pages=data.draw(st.integers(least, 3 * least)),
            page_size=page_size,
            context_length=CONTEXT,
            max_running_requests=data.draw(st.integers(1, 5)),
            chunked_prefill_size=data.draw(st.sampled_from([-1, 1, 7, 16, 64])),
            max_prefill_tokens=data.draw(st.sampled_from([None, 8, 40])),
            prefill_max_requests=data.draw(st.sampled_from([None, 1, 2])),
            policy=data.draw(st.sampled_from(["fcfs", "lpm", "priority"])),
            low_priority_first=data.draw(st.booleans()),
            starvation_limit=data.draw(st.sampled_from([1, 3, 100])),
            eviction_policy=data.draw(st.sampled_from(["lru", "lfu", "fifo", "priority"])),
            enable_radix_cache=data.draw(st.sampled_from([True, True, True, False])),
            eos_token_ids=(END_TOKEN,),
            overlap=data.draw(st.booleans()) and not draft_tokens,
            draft_tokens=draft_tokens,
            executor_drafts=self.executor_drafts,
            verified_tokens=data.draw(st.sampled_from([3, 48])),
        )
        self.driver = Driver(self.config, vocab_size=VOCABULARY)

    @rule(data=st.data())
    def admit(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(1, 3))
        keys: list[int] = []
        prompts: list[list[int]] = []
        values: dict[str, list[int]] = {"max_new_tokens": [], "min_new_tokens": [], "flags": [], "priority": []}
        extras: dict[int, RequestExtras] = {}
        for index in range(count):
            request = self._draw_request(data)
            solo_run(request)
            self.expected[self.next_key] = request
            keys.append(self.next_key)
            prompts.append(request.prompt)
            values["max_new_tokens"].append(request.max_new_tokens)
            values["min_new_tokens"].append(request.min_new_tokens)
            values["flags"].append(RequestFlags.IGNORE_EOS if request.ignore_eos else 0)
            values["priority"].append(data.draw(st.integers(-1, 1)))
            if request.stop_tokens:
                extras[index] = RequestExtras(stop_token_ids=request.stop_tokens)
            self.next_key += 1
        self.driver.admit(keys, prompts, extras=extras, **values)

    def _draw_request(self, data: st.DataObject) -> Expected:
        """Often a prefix or a continuation of an earlier sequence, so that the cache has something to find."""
        base: list[int] = []
        if bool(self.expected) and data.draw(st.booleans()):
            known = self.expected[data.draw(st.sampled_from(sorted(self.expected)))]
            base = known.prompt + known.solo
            base = base[: data.draw(st.integers(0, len(base)))]
        length = data.draw(st.integers(0 if base else 1, 40))
        salt = data.draw(st.integers(0, 3))
        prompt = (base + [(salt + 7 * position) % VOCABULARY for position in range(length)])[: CONTEXT - 1]
        max_new_tokens = min(data.draw(st.integers(0, 30)), CONTEXT - len(prompt))
        return Expected(
            prompt=prompt,
            max_new_tokens=max_new_tokens,
            min_new_tokens=data.draw(st.sampled_from([0, 0, 0, 5])),
            ignore_eos=data.draw(st.booleans()),
            stop_tokens=data.draw(st.sampled_from([(), (), (3,), tuple(range(10, 20))])),
        )

    @rule()
    def plan(self) -> None:
        """Where nothing is in flight, the loop relies on ``has_work``: it would spin or sleep for ever otherwise."""
        idle = not self.driver.executor.in_flight
        has_work = self.driver.scheduler.has_work
        plan = self.driver.plan()
        if idle:
            assert (plan is not None) == has_work
            assert has_work == (bool(self._running_keys()) and not self.paused)

    @precondition(lambda self: self.driver.executor.in_flight)
    @rule()
    def commit(self) -> None:
        self.driver.commit()

    @precondition(lambda self: self.driver.executor.in_flight)
    @rule()
    def fail(self) -> None:
        """The executor fails; the plan's requests end, and only they."""
        output = self.driver.executor.collect()
        columns = self.driver.scheduler.fail(output.step, "broken", self.driver.now)
        self.driver.receive(columns)
        for key in columns.key.tolist():
            self.expected[key].ended_early = True
            self.expected[key].sent_at_end = len(self.driver.received[key].tokens)

    @rule(steps=st.integers(1, 15))
    def run(self, steps: int) -> None:
        for _ in range(steps):
            if not self.driver.step():
                return
            self.pages_have_one_owner()

    @precondition(lambda self: self._running_keys())
    @rule(data=st.data(), stop=st.booleans())
    def end_one(self, data: st.DataObject, stop: bool) -> None:
        """Abort a request, or finish it as the front does when it finds a stop string."""
        key = data.draw(st.sampled_from(self._running_keys()))
        received = self.driver.received.get(key)
        self.expected[key].ended_early = True
        self.expected[key].sent_at_end = len(received.tokens) if received else 0
        if stop:
            self.driver.scheduler.finish([key], self.driver.now)
        else:
            assert self.driver.scheduler.abort([key], self.driver.now) == 1
            columns = self.driver.drain()
            assert columns.key.tolist() == [key]
            assert columns.finish.tolist() == [FinishCode.ABORTED]

    @rule(mode=st.sampled_from(["in_place", "retract"]))
    def pause(self, mode: Any) -> None:
        self.driver.scheduler.pause(mode, self.driver.now)
        self.paused = mode

    @rule()
    def resume(self) -> None:
        self.driver.scheduler.resume()
        self.paused = ""

    @rule()
    def flush(self) -> None:
        waits = not self._running_keys() or self.paused == "retract"
        idle = waits and not self.driver.executor.in_flight
        assert self.driver.scheduler.flush() == idle
        if idle:
            assert self.driver.scheduler.stats().free_pages == self.config.num_pages

    @rule(pages=st.integers(1, 4))
    def maintain(self, pages: int) -> None:
        assert 0 <= self.driver.scheduler.maintain(pages) <= pages

    @invariant()
    def pages_have_one_owner(self) -> None:
        if not hasattr(self, "driver"):
            return
        self.driver.scheduler.audit()
        stats = self.driver.scheduler.stats()
        assert stats.free_pages + stats.cached_pages + stats.held_pages == self.config.num_pages
        assert stats.num_running + stats.num_waiting == len(self._running_keys())
        if self.paused == "retract" and not stats.num_in_flight:
            assert stats.held_pages == 0

    @invariant()
    def outputs_follow_the_solo_run(self) -> None:
        if not hasattr(self, "driver"):
            return
        for key, received in self.driver.received.items():
            request = self.expected[key]
            assert received.tokens == request.solo[: len(received.tokens)]
            if request.ended_early:
                assert len(received.tokens) == request.sent_at_end
            elif received.finish != FinishCode.RUNNING:
                assert received.finish == request.code
                assert received.tokens == request.solo
                stopped = received.finish == FinishCode.STOP_TOKEN
                assert received.matched == (request.solo[-1] if stopped else -1)

    def teardown(self) -> None:
        if not hasattr(self, "driver"):
            return
        self.resume()
        self.driver.run(after_step=self.pages_have_one_owner)
        assert not self._running_keys()
        self.outputs_follow_the_solo_run()
        assert self.driver.scheduler.flush()
        assert self.driver.scheduler.stats().free_pages == self.config.num_pages

    def _running_keys(self) -> list[int]:
        received = self.driver.received
        return [
            key
            for key, request in self.expected.items()
            if not request.ended_early and (key not in received or received[key].finish == FinishCode.RUNNING)
        ]


@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
def test_outputs_do_not_depend_on_scheduling(page_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # Sequences are short here; waiting for a common prefix has to happen all the same.
    monkeypatch.setattr(sharing, "MIN_SHARED_TOKENS", 6)
    machine = type("Machine", (SchedulerMachine,), {"page_sizes": (page_size,)})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=20,
            stateful_step_count=25,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.parametrize("executor_drafts", [False, True], ids=["n-gram", "draft model"])
@pytest.mark.parametrize("page_size", [1, 4])
def test_guesses_change_no_output(page_size: int, executor_drafts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # Of four tokens a quarter of the guesses is right, and sequences repeat themselves at once.
    monkeypatch.setattr(sys.modules[__name__], "VOCABULARY", 4)
    options = {"page_sizes": (page_size,), "draft_tokens": (1, 4, 15), "executor_drafts": executor_drafts}
    machine = type("Machine", (SchedulerMachine,), options)
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=20,
            stateful_step_count=25,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
