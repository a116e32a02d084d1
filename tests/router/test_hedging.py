"""Hedging over HTTP: the second worker, the end of the slower one, and everything that a request has but once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from aiohttp import web

from sglang_lite.router.admission import Ticket
from sglang_lite.router.migration import FIELD, HEADER
from sglang_lite.router.policies import CacheAware
from tests.router.test_proxy import CHAT, CHAT_PATH, code_of
from tests.support.null_workers import NullWorker, RouterUnderTest, router_over
from tests.support.races import NEVER, Races, check_idle, check_results, result_counts, soon

STREAM = {**CHAT, "stream": True}


class Slow(NullWorker):
    """Answers as it is told.

    Attributes:
        open: each permit lets a request go on one step: its first byte, then its end.
        fails: the status that it answers with.
        left: requests whose caller went away.
    """

    def __init__(self, name: str, *, early: bool = False, **info: Any) -> None:
        super().__init__(**info)
        self.name = name
        self.open = asyncio.Semaphore(0)
        self.fails = 0
        self.early = early
        self.running = self.left = 0
        self.answer = self._steps

    def allow(self, steps: int = 2) -> None:
        for _ in range(steps):
            self.open.release()

    async def _steps(self, request: web.Request, data: bytes) -> web.StreamResponse:
        self.running += 1
        try:
            streamed = msgspec.json.decode(data).get("stream") is True
            response = web.StreamResponse(headers={"content-type": "text/event-stream"})
            if streamed and self.early:
                await response.prepare(request)
            await self.open.acquire()
            if self.fails:
                return web.json_response({"error": self.name}, status=self.fails)
            if not streamed:
                await self.open.acquire()
                return web.json_response({"worker": self.name})
            if not response.prepared:
                await response.prepare(request)
            await response.write(b"data: %b\n\n" % self.name.encode())
            await self.open.acquire()
            await response.write(b"data: end\n\ndata: [DONE]\n\n")
            return response
        except asyncio.CancelledError:
            self.left += 1
            raise
        finally:
            self.running -= 1


class Scene:
    """Workers of which the first has the request, and a client that waits for it."""

    def __init__(self, router: RouterUnderTest, races: Races) -> None:
        self.router = router
        self.races = races

    async def send(self, worker: Slow, body: Any = CHAT, path: str = CHAT_PATH, **options: Any) -> asyncio.Task[Any]:
        """A request that ``worker`` has."""
        before = len(worker.seen)
        task = asyncio.create_task(self.router.post(path, body, **options))
        await soon(lambda: len(worker.seen) > before or task.done())
        assert not task.done(), task.result()
        return task

    async def hedge(self, worker: Slow) -> None:
        """The hedge is due, and ``worker`` has it."""
        before = len(worker.seen)
        self.races.fire()
        await soon(lambda: len(worker.seen) > before)


@asynccontextmanager
async def scene(*workers: Slow, races: Races, **options: Any) -> AsyncIterator[Scene]:
    settings = {"policy": "round_robin", "hedge_after_secs": NEVER, "hedge_max_percent": 100.0}
    async with router_over(*workers, **{**settings, "request_timeout_secs": 2 * NEVER, **options}) as router:
        yield Scene(router, races)
        await check_idle(router)
        await soon(lambda: not any(worker.running for worker in workers))


@pytest.fixture
def races(monkeypatch: pytest.MonkeyPatch) -> Races:
    return Races(monkeypatch)


async def test_the_timer_sends_the_hedge() -> None:
    """With nothing played: a worker that hangs costs the delay."""
    first, second = Slow("a"), Slow("b")
    second.allow()
    settings = {"policy": "round_robin", "hedge_after_secs": 0.01, "hedge_max_percent": 100.0}
    async with router_over(first, second, **settings) as router:
        status, _, body = await router.post(CHAT_PATH, CHAT)
        assert (status, msgspec.json.decode(body)) == (200, {"worker": "b"})
        await check_idle(router)
    assert first.left == 1


@pytest.mark.parametrize("streamed", [False, True])
async def test_the_hedge_wins(races: Races, streamed: bool) -> None:
    """Both workers get the same request and id; the slower one's call is ended; breakers learn of the faster only."""
    first, second = Slow("a"), Slow("b")
    async with scene(first, second, races=races) as play:
        one, other = play.router.context.registry.targets()
        one.breaker.fail(0.0)
        task = await play.send(first, STREAM if streamed else CHAT, headers={"x-request-id": "mine"})
        await play.hedge(second)
        assert [worker.load for worker in (one, other)] == [1, 1]
        second.allow()
        status, headers, body = await task
        assert status == 200 and headers["x-request-id"] == "mine"
        assert body == (b"data: b\n\ndata: end\n\ndata: [DONE]\n\n" if streamed else b'{"worker": "b"}')
        await soon(lambda: first.left)
        assert first.seen[0][1]["x-request-id"] == second.seen[0][1]["x-request-id"] == "mine"
        assert first.seen[0][2] == second.seen[0][2]
        assert one.breaker._failures == 1  # neither one more, nor forgotten
        await check_results(play.router, won=1)
        assert b"smg_worker_retries_total 0.0" in play.router.context.metrics.text()


@pytest.mark.parametrize("streamed", [False, True])
async def test_the_first_wins(races: Races, streamed: bool) -> None:
    first, second = Slow("a"), Slow("b")
    async with scene(first, second, races=races) as play:
        task = await play.send(first, STREAM if streamed else CHAT)
        await play.hedge(second)
        first.allow()
        status, _, body = await task
        assert status == 200 and b"a" in body and b"b" not in body.replace(b"worker", b"")
        await soon(lambda: second.left)
        await check_results(play.router, lost=1)


async def test_no_hedge_behind_the_first_part(races: Races) -> None:
    """Headers that come early say nothing; the first part does, and then the worker may take its time."""
    first, second = Slow("a", early=True), Slow("b", early=True)
    async with scene(first, second, races=races) as play:
        first.allow(1)
        async with play.router.session.post(play.router.url + CHAT_PATH, json=STREAM) as response:
            assert await response.content.readuntil(b"\n\n") == b"data: a\n\n"
            races.fire()
            first.allow(1)
            assert (await response.read()).endswith(b"[DONE]\n\n")
        assert second.seen == []
        await check_results(play.router)
        task = await play.send(second, STREAM)  # whose headers are there
        await play.hedge(first)
        first.allow()
        assert (await task)[2].startswith(b"data: a\n\n")
        await check_results(play.router, won=1)


async def test_both_fail_and_a_third_one_answers(races: Races) -> None:
    """The usual rules go on: another worker that has not had the request, one retry, no second hedge."""
    first, second, third = Slow("a"), Slow("b"), Slow("c")
    second.fails = third.fails = 503
    async with scene(first, second, third, races=races) as play:
        task = await play.send(first)
        races.fire()
        await soon(lambda: second.running or third.running)
        hedge, last = (second, third) if second.running else (third, second)
        last.fails = first.fails = 0
        hedge.allow(1)
        await soon(lambda: not hedge.running)
        assert not task.done() and first.running  # the first one may still answer
        first.fails = 500
        first.allow()
        await soon(lambda: last.running)
        races.fire()
        assert not first.running
        last.allow()
        status, _, body = await task
        assert (status, msgspec.json.decode(body)) == (200, {"worker": last.name})
        await check_results(play.router, failed=1)
        assert b"smg_worker_retries_total 1.0" in play.router.context.metrics.text()
        assert [one.breaker._failures for one in play.router.context.registry.targets() if one.url != last.url] == [
            1,
            1,
        ]


async def test_the_first_fails_and_the_hedge_goes_on(races: Races) -> None:
    """A hedge that runs is the next attempt; there is no other one beside it."""
    first, second, third = Slow("a"), Slow("b"), Slow("c")
    async with scene(first, second, third, races=races) as play:
        task = await play.send(first)
        races.fire()
        await soon(lambda: second.running or third.running)
        hedge = second if second.running else third
        first.fails = 503
        first.allow()
        await soon(lambda: not first.running)
        assert play.router.context.leases.total <= 2 and second.running + third.running == 1
        hedge.allow()
        assert msgspec.json.decode((await task)[2]) == {"worker": hedge.name}
        await check_results(play.router, won=1)
        assert second.seen + third.seen == hedge.seen


@pytest.mark.parametrize("status", [400, 404, 429])
async def test_a_refusal_counts_if_it_is_the_first_ones(races: Races, status: int) -> None:
    first, second = Slow("a"), Slow("b")
    async with scene(first, second, races=races) as play:
        task = await play.send(first)
        second.fails = status
        await play.hedge(second)
        second.allow(1)
        await soon(lambda: not second.running)
        first.allow()
        assert (await task)[0] == 200
        second.fails = 0
        task = await play.send(second)
        await play.hedge(first)
        second.fails = status
        second.allow(1)
        got, _, body = await task
        assert (got, msgspec.json.decode(body)) == (status, {"error": "b"})
        await soon(lambda: first.left)
        await check_results(play.router, failed=1, lost=1)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("state", ["alone", "both", "claimed"])
async def test_a_client_that_leaves_ends_both(races: Races, state: str, streamed: bool) -> None:
    first, second = Slow("a"), Slow("b")
    async with scene(first, second, races=races) as play:
        task = await play.send(first, STREAM if streamed else CHAT)
        if state != "alone":
            await play.hedge(second)
        if state == "claimed":
            second.allow(1)
            if streamed:
                await soon(lambda: first.left)
        task.cancel()
        await check_idle(play.router)
        await soon(lambda: first.left and (state == "alone" or second.left))
        assert [one.breaker._failures for one in play.router.context.registry.targets()] == [0, 0]
        assert all(one.breaker.state.name == "CLOSED" for one in play.router.context.registry.targets())


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"model": "m", "input": "x"}),
        ("/generate", {"text": "x", "session_params": {"id": "s"}}),
        ("/v1/tokenize", {"prompt": "x"}),
        ("/tokenize", {"prompt": "x"}),
        ("/abort_request", {"rid": "x"}),
    ],
)
async def test_what_is_never_hedged(races: Races, path: str, body: Any) -> None:
    first, second = NullWorker(), NullWorker()
    async with router_over(first, second, hedge_after_secs=1e-9, hedge_max_percent=100.0) as router:
        await router.post(path, body)
        assert races.begun == []
        await check_results(router)


async def test_keys_stay_where_they_are(races: Races) -> None:
    for policy in ("manual", "consistent_hashing"):
        first, second = Slow("a"), Slow("b")
        async with scene(first, second, races=races, policy=policy) as play:
            key = {"x-smg-routing-key": "k"}
            first.allow()
            second.allow()
            home = first if b'"a"' in (await play.router.post(CHAT_PATH, CHAT, headers=key))[2] else second
            away = second if home is first else first
            task = await play.send(home, headers=key)
            await play.hedge(away)
            assert msgspec.json.decode((await task)[2]) == {"worker": away.name}
            away.allow()
            home.allow()
            again = await play.router.post(CHAT_PATH, CHAT, headers=key)
            assert msgspec.json.decode(again[2]) == {"worker": home.name}


async def test_what_was_sent_is_known_of_the_winner_only(races: Races) -> None:
    first, second, third = Slow("a"), Slow("b"), Slow("c")
    async with scene(first, second, third, races=races, policy="cache_aware") as play:
        policy = play.router.context.policies["regular"]
        assert isinstance(policy, CacheAware)

        def known() -> set[str]:
            prompt = msgspec.json.encode(CHAT["messages"])
            workers = dict(zip((first.url, second.url, third.url), "abc", strict=True))
            found = policy._guess(play.router.context.registry.targets(), prompt)[1]
            return {workers[worker.url] for worker in found}

        task = asyncio.create_task(play.router.post(CHAT_PATH, CHAT))
        await soon(lambda: first.running + second.running + third.running)
        (home,) = (worker for worker in (first, second, third) if worker.running)
        races.fire()
        await soon(lambda: first.running + second.running + third.running == 2)
        (away,) = (worker for worker in (first, second, third) if worker.running and worker is not home)
        assert known() == {home.name}
        away.allow()
        await task
        assert known() == {home.name, away.name}


async def test_ranks_of_one_server_are_one_place(races: Races) -> None:
    """The hedge goes to another server, with a rank of that one; with a single server there is none."""
    first, second = Slow("a", dp_size=2), Slow("b", dp_size=2)
    async with scene(first, second, races=races, dp_aware=True) as play:
        task = await play.send(first)
        await play.hedge(second)
        second.allow()
        await task
        assert msgspec.json.decode(second.seen[0][2]) in [{**CHAT, "data_parallel_rank": rank} for rank in (0, 1)]
    async with scene(alone := Slow("a", dp_size=2), races=races, dp_aware=True) as play:
        task = await play.send(alone)
        races.fire()
        alone.allow()
        assert (await task)[0] == 200 and len(alone.seen) == 1
        await check_results(play.router, no_worker=1)


async def test_the_budget_keeps_a_slow_fleet_from_more(races: Races) -> None:
    """Everybody is slow: of eight requests two are hedged, and the others go on as they were."""
    first, second = Slow("a"), Slow("b")
    async with scene(first, second, races=races, hedge_max_percent=25.0) as play:
        tasks = []
        for number in range(8):
            tasks.append(await play.send((first, second)[number % 2]))
            races.fire()
        await soon(lambda: first.running + second.running == 10)
        await check_results(play.router, budget=6)
        first.allow(20)
        second.allow(20)
        assert [status for status, _, _ in await asyncio.gather(*tasks)] == [200] * 8


async def test_a_request_is_admitted_and_charged_once(races: Races, monkeypatch: pytest.MonkeyPatch) -> None:
    charged: list[int] = []
    monkeypatch.setattr(Ticket, "charge", lambda ticket, tokens: charged.append(tokens))
    first, second = Slow("a"), Slow("b")
    async with scene(first, second, races=races, max_concurrent_requests=1, queue_size=0) as play:
        task = await play.send(first, STREAM)
        await play.hedge(second)  # which needs no second place
        assert play.router.context.admission.running == 1
        second.allow()
        assert (await task)[0] == 200
        await soon(lambda: play.router.context.admission.running == 0)
        assert sum(charged) == 3


async def test_time_is_over_for_both(races: Races) -> None:
    """One time limit; the worker that had all of it failed, the hedge said nothing. No retry."""
    first, second = Slow("a"), Slow("b")
    async with scene(first, second, races=races, hedge_after_secs=0.02, request_timeout_secs=0.4) as play:
        status, _, body = await play.router.post(CHAT_PATH, CHAT)
        assert (status, code_of(body)) == (502, "upstream_timeout")
        failures = [worker.breaker._failures for worker in play.router.context.registry.targets()]
        assert failures == [1, 0] and len(races.begun) == 1
        assert result_counts(play.router).keys() <= {"abandoned", "failed"}


async def test_stale_requests_expire_with_their_hedge(races: Races) -> None:
    first, second = Slow("a"), Slow("b")
    async with scene(first, second, races=races, stale_request_timeout_secs=1.5) as play:
        task = await play.send(first)
        races.fire()
        status, _, body = await task
        assert (status, code_of(body)) == (504, "stale_request_expired")
        await check_idle(play.router)


async def test_a_stream_that_was_hedged_moves(races: Races) -> None:
    """The hedge wins, breaks later, and a third worker goes on; the client has every event once."""

    async def broken(request: web.Request, data: bytes) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream", HEADER: "1"})
        await response.prepare(request)
        await response.write(b'data: 1\n\n:sgl {"sent":[[5]],"id":"x","created":3}\n\n')
        assert request.transport is not None
        request.transport.close()
        return response

    async def rest(request: web.Request, data: bytes) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream", HEADER: "1"})
        await response.prepare(request)
        await response.write(b'data: 2\n\ndata: [DONE]\n\n:sgl {"sent":[[6]]}\n\n')
        return response

    first, second, third = Slow("a"), Slow("b"), Slow("c")
    second.answer, third.answer = broken, rest
    async with scene(first, second, third, races=races, migrate_streams=True) as play:
        play.router.context.registry.workers[third.url].healthy = False  # the hedge is for the second
        task = await play.send(first, STREAM)
        races.fire()
        play.router.context.registry.workers[third.url].healthy = True
        status, _, body = await task
        assert (status, body) == (200, b"data: 1\n\ndata: 2\n\ndata: [DONE]\n\n")
        assert msgspec.json.decode(third.seen[0][2])[FIELD] == {"sent": [[5]], "id": "x", "created": 3}
        assert len(races.begun) == 1
        await check_results(play.router, won=1)


async def test_a_whole_answer_that_breaks_is_made_again(races: Races) -> None:
    """It had begun and won; nothing of it had gone to the client."""

    async def half(request: web.Request, data: bytes) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "application/json", "content-length": "99"})
        await response.prepare(request)
        await response.write(b"{")
        assert request.transport is not None
        request.transport.close()
        return response

    first, second, third = Slow("a"), Slow("b"), Slow("c")
    second.answer = half
    async with scene(first, second, third, races=races) as play:
        play.router.context.registry.workers[third.url].healthy = False
        task = await play.send(first)
        races.fire()
        play.router.context.registry.workers[third.url].healthy = True
        third.allow()
        status, _, body = await task
        assert (status, msgspec.json.decode(body)) == (200, {"worker": "c"})


async def test_times_to_the_first_byte_set_the_delay(races: Races) -> None:
    first, second = NullWorker(), NullWorker()
    async with router_over(first, second, hedge_quantile=0.9) as router:
        hedging = router.context.hedging
        assert hedging is not None
        for _ in range(100):
            assert hedging.delay((CHAT_PATH, False)) is None
            assert (await router.post(CHAT_PATH, CHAT))[0] == 200
        delay = hedging.delay((CHAT_PATH, False))
        assert delay is not None and delay > 0
        assert hedging.delay((CHAT_PATH, True)) is None
