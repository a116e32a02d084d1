"""Hedging beside everything else: policies, limits, time, streams that move, and what is never sent twice."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from aiohttp import web

from sglang_lite.router.admission import Ticket
from sglang_lite.router.migration import FIELD, HEADER
from sglang_lite.router.policies import CacheAware
from tests.router.test_proxy import code_of
from tests.support.null_workers import NullWorker, router_over
from tests.support.races import Races, check_idle, check_results, result_counts, soon
from tests.support.slow_workers import CHAT, CHAT_PATH, STREAM, Slow, scene


@pytest.fixture
def races(monkeypatch: pytest.MonkeyPatch) -> Races:
    return Races(monkeypatch)


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


async def test_without_retries_the_hedge_is_still_there(races: Races) -> None:
    first, second = Slow("a"), Slow("b")
    async with scene(first, second, races=races, disable_retries=True) as play:
        task = await play.send(first)
        await play.hedge(second)
        first.fails = 503
        first.allow(1)
        await soon(lambda: not first.running)
        second.allow()
        assert (await task)[0] == 200
        first.fails, second.fails = 0, 503
        task = await play.send(second)
        second.allow(1)
        assert (await task)[0] == 503 and first.count(CHAT_PATH) == 1
