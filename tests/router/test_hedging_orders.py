"""Every order in which the two exchanges of a request may begin, fail and end, and its client leave."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_lite.router import proxy
from sglang_lite.router.body import parse_head
from sglang_lite.router.breaker import Breaker, BreakerLimits
from sglang_lite.router.call import Call
from sglang_lite.router.context import RouterContext
from sglang_lite.router.errors import RouterError
from sglang_lite.router.exchange import RETRIED, Reply
from sglang_lite.router.lease import Lease
from sglang_lite.router.options import RouterOptions, checked
from sglang_lite.router.prompt import Prompt
from sglang_lite.router.proxy import Attempts
from sglang_lite.router.race import Leg, Race
from sglang_lite.router.workers import Worker
from tests.support.races import NEVER, Races


class Heard(Breaker):
    """A breaker that keeps what it is told."""

    __slots__ = ("told",)

    def __init__(self) -> None:
        super().__init__(BreakerLimits(failures=100))
        self.told: list[str] = []

    def succeed(self, is_probe: bool = True) -> None:
        self.told.append("well")
        super().succeed(is_probe)

    def fail(self, now: float, is_probe: bool = True) -> None:
        self.told.append("failed")
        super().fail(now, is_probe)

    def forget(self, is_probe: bool = True) -> None:
        self.told.append("nothing")
        super().forget(is_probe)


class Played:
    """An exchange whose worker does what the test says."""

    def __init__(self, worker: Worker, leg: Leg | None) -> None:
        self.worker = worker
        self.is_hedge = leg is not None and leg.is_hedge
        self.answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.end: asyncio.Future[str] = asyncio.get_running_loop().create_future()


class Stage:
    """One call with three workers, whose exchanges are played. What must hold at every moment is checked there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.live: list[Played] = []
        self.hedges = 0
        self.claims: list[Worker] = []
        self.ended: list[tuple[Worker, str]] = []
        self.races = Races(monkeypatch)
        monkeypatch.setattr(proxy, "exchange", self._exchange)
        self.context = RouterContext(
            checked(
                RouterOptions(
                    worker_urls=("http://a", "http://b", "http://c"),
                    policy="round_robin",
                    hedge_after_secs=NEVER,
                    hedge_max_percent=100.0,
                    request_timeout_secs=2 * NEVER,
                    retry_max_retries=3,
                    retry_initial_backoff_ms=0.0,
                )
            )
        )
        for worker in self.context.registry.workers.values():
            worker.take_info({"served_model_name": "m"})
            worker.breaker = Heard()
        request = SimpleNamespace(path="/generate", headers={})
        self.call = Call(cast(Any, request), self.context, b"{}", parse_head(b"{}"), "id", {}, Prompt(b""))

    async def _exchange(
        self, call: Call, worker: Worker, body: bytes, lease: Lease, *, moving: None, leg: Leg
    ) -> tuple[None, Reply]:
        assert all(one.worker is not worker for one in self.live), "a request is at one worker twice"
        had = {one for one, _ in self.ended} | {one.worker for one in self.live}
        assert worker not in had or (len(had) == 3 and not leg.is_hedge), "there is a worker that has not had it"
        played = Played(worker, leg)
        self.hedges += leg.is_hedge
        self.live.append(played)
        assert len(self.live) <= 2
        ended = "nothing"
        try:
            answer = await played.answer
            if answer.isdigit() and int(answer) not in RETRIED:
                leg.claim(int(answer))
                self.claims.append(worker)
                answer = answer if await played.end == "end" else "lost"
            ended = "well" if answer.isdigit() and int(answer) < 500 else "failed"
            lease.judge(ended == "well")
            if answer.isdigit():
                return None, Reply(int(answer), {}, worker.name.encode())
            raise RouterError("upstream_timeout" if answer == "late" else "upstream_unreachable", answer)
        finally:
            self.ended.append((worker, ended))
            self.live.remove(played)

    def act(self, action: str, client: asyncio.Task[Any]) -> None:
        """One thing happens; nothing, where it cannot."""
        who, _, what = action.partition(" ")
        if who == "leave":
            client.cancel()
        elif who == "fire" and self.races.begun:
            self.races.fire()
        for played in self.live:
            if played.is_hedge == (who == "hedge") and who in ("hedge", "first"):
                future = played.end if what in ("end", "break") else played.answer
                if not future.done():
                    future.set_result(what)

    async def settle(self) -> None:
        for _ in range(12):
            await asyncio.sleep(0)


@pytest.fixture
def patched() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


ANSWERS = ("200", "400", "503", "lost", "late")
ACTIONS = [
    "fire",
    "leave",
    *(f"{who} {what}" for who in ("first", "hedge") for what in (*ANSWERS, "end", "break")),
]


@settings(deadline=None, max_examples=250)
@given(st.lists(st.lists(st.sampled_from(ACTIONS), min_size=1, max_size=3), max_size=9))
def test_every_order_of_answers_hedges_and_failures(moments: list[list[str]]) -> None:
    """What is in one moment happens before anything runs: nothing may depend on who is resumed first."""

    async def play(stage: Stage) -> None:
        client = asyncio.create_task(Attempts(stage.call).run())
        await stage.settle()
        for moment in moments:
            for action in moment:
                stage.act(action, client)
            await stage.settle()
            assert stage.context.leases.total == len(stage.live)
            assert stage.hedges <= 1
            if len(stage.live) == 2:
                assert not client.done() and [one.is_hedge for one in stage.live] == [False, True]
        while not client.done():  # the rest goes well
            stage.act("first 200", client)
            stage.act("first end", client)
            if not any(not one.is_hedge for one in stage.live):
                stage.act("hedge 200", client)
                stage.act("hedge end", client)
            await stage.settle()
        check(stage, client)

    with pytest.MonkeyPatch.context() as patch:
        asyncio.run(play(Stage(patch)))


def check(stage: Stage, client: asyncio.Task[Any], codes: tuple[str, ...] = ()) -> None:
    """After the call: nothing is left, breakers know how their workers' exchanges ended (nothing of those that were
    cut off), and the answer is that of the last worker that began one."""
    context = stage.context
    assert (context.leases.total, stage.live, context.scopes) == (0, [], {})
    assert [worker.load for worker in context.registry.targets()] == [0, 0, 0]
    assert all(task is asyncio.current_task() or task.done() for task in asyncio.all_tasks())
    for worker in context.registry.targets():
        assert isinstance(worker.breaker, Heard)
        wanted = [ended for one, ended in stage.ended if one is worker]
        assert worker.breaker.told == wanted or codes
    results = [race.result for race in stage.races.begun if race.result is not None]
    assert stage.hedges <= len(results) <= 1  # one that loses in the moment it is due is not sent any more
    counted = sum(
        sample.value
        for metric in context.metrics.hedges.collect()
        for sample in metric.samples
        if "total" in sample.name
    )
    assert counted == len(results)
    if client.cancelled():
        return
    error = client.exception()
    if error is not None:
        assert isinstance(error, RouterError) and error.code in ("upstream_unreachable", "upstream_timeout", *codes)
    elif client.result().status not in RETRIED and stage.claims:
        assert client.result().body == stage.claims[-1].name.encode()


async def test_a_loser_says_nothing_about_its_worker(patched: pytest.MonkeyPatch) -> None:
    stage = Stage(patched)
    first, second, _ = stage.context.registry.targets()
    first.breaker.fail(0.0)
    client = asyncio.create_task(Attempts(stage.call).run())
    for action in ("", "fire", "hedge 200", "hedge end"):
        stage.act(action, client)
        await stage.settle()
    assert (await client).status == 200
    assert (first.breaker._failures, second.breaker._failures) == (1, 0)  # neither one more nor forgotten
    assert [race.result for race in stage.races.begun] == ["won"]


@pytest.mark.parametrize("ending", ["late", "stale"])
async def test_the_end_of_the_time_is_that_of_both(patched: pytest.MonkeyPatch, ending: str) -> None:
    stage = Stage(patched)
    client = asyncio.create_task(Attempts(stage.call).run())
    for action in ("", "fire"):
        stage.act(action, client)
        await stage.settle()
    assert len(stage.live) == 2
    if ending == "late":
        stage.act("first late", client)
    else:
        next(iter(stage.context.scopes.values())).reschedule(0.0)
    with pytest.raises(RouterError) as caught:
        await client
    assert caught.value.code == {"late": "upstream_timeout", "stale": "stale_request_expired"}[ending]
    assert [race.result for race in stage.races.begun] == ["abandoned"]
    check(stage, client, ("stale_request_expired",))


async def test_a_probe_that_loses_leaves_the_probe_to_the_next(patched: pytest.MonkeyPatch) -> None:
    stage = Stage(patched)
    first, *_ = stage.context.registry.targets()
    for _ in range(100):
        first.breaker.fail(-1000.0)
    client = asyncio.create_task(Attempts(stage.call).run())
    await stage.settle()
    assert stage.live[0].worker is first and not first.breaker.allows(stage.context.now)
    for action in ("fire", "hedge 200", "hedge end"):
        stage.act(action, client)
        await stage.settle()
    await client
    assert first.breaker.state.name == "HALF_OPEN" and first.breaker.allows(stage.context.now)


async def test_workers_that_need_a_probe_get_no_hedge(patched: pytest.MonkeyPatch) -> None:
    stage = Stage(patched)
    _, second, third = stage.context.registry.targets()
    third.healthy = False
    for _ in range(100):
        second.breaker.fail(-1000.0)
    client = asyncio.create_task(Attempts(stage.call).run())
    for action in ("", "fire"):
        stage.act(action, client)
        await stage.settle()
    assert [one.is_hedge for one in stage.live] == [False]
    third.healthy = True
    stage.act("fire", client)
    await stage.settle()
    assert [one.worker for one in stage.live][1:] == [third]
    client.cancel()
    await asyncio.gather(client, return_exceptions=True)
    assert [race.result for race in stage.races.begun] == ["abandoned"]


async def test_a_fault_of_a_hedge_is_told(caplog: pytest.LogCaptureFixture) -> None:
    async def first(leg: Leg) -> str:
        await faulty.wait()
        await asyncio.sleep(0)
        leg.claim(200)
        return "well"

    async def second(leg: Leg) -> str:
        faulty.set()
        raise ValueError("a fault")

    faulty = asyncio.Event()
    race = Race[str](first, lambda: second, NEVER, lambda is_hedge: None)
    assert await race.run(0.0) == "well"
    assert race.result == "failed" and "fault of a hedge" in caplog.text
    gc.collect()
    assert "never retrieved" not in caplog.text


async def test_a_race_that_was_lost_cannot_be_claimed() -> None:
    async def first(leg: Leg) -> str:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            leg.claim(200)  # a part came in the same moment
        raise AssertionError("unreachable")

    async def second(leg: Leg) -> str:
        leg.claim(200)
        return "second"

    assert await Race[str](first, lambda: second, NEVER, lambda is_hedge: None).run(0.0) == "second"
