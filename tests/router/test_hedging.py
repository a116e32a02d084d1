"""Hedging over HTTP: when the second worker gets a request, whose answer counts, and the end of the slower one."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from aiohttp import web

from tests.support.null_workers import NullWorker, router_over
from tests.support.races import Races, check_idle, check_results, result_counts, soon
from tests.support.slow_workers import CHAT, CHAT_PATH, STREAM, Slow, scene


@pytest.fixture
def races(monkeypatch: pytest.MonkeyPatch) -> Races:
    return Races(monkeypatch)


async def test_the_timer_sends_the_hedge() -> None:
    """With nothing played: a worker that hangs costs the delay."""
    first, second = Slow("a"), Slow("b")
    second.allow()
    settings: dict[str, Any] = {"policy": "round_robin", "hedge_after_secs": 0.01, "hedge_max_percent": 100.0}
    async with router_over(first, second, **settings) as router:
        status, _, body = await router.post(CHAT_PATH, CHAT)
        assert (status, msgspec.json.decode(body)) == (200, {"worker": "b"})
        await check_idle(router)
        await soon(lambda: first.left == len(first.seen))  # none, if it had not even come


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


async def test_a_flood_of_hedges() -> None:
    """Workers that answer, wait, fail and break as chance has it, clients of whom some leave: everybody who stays gets
    one whole answer of one worker, and nothing is left."""
    chance, at_worker = random.Random(7), Counter[tuple[str, str]]()
    most, workers = 0, [NullWorker() for _ in range(4)]

    def answering(worker: NullWorker) -> Any:
        async def answer(request: web.Request, data: bytes) -> web.StreamResponse:
            nonlocal most
            key = (worker.url, request.headers["x-request-id"])
            at_worker[key] += 1
            most = max(most, at_worker[key])
            try:
                if chance.random() < 0.4:
                    await asyncio.sleep(chance.random() * 0.03)
                if chance.random() < 0.1:
                    return web.json_response({}, status=503)
                if msgspec.json.decode(data).get("stream") is not True:
                    return web.json_response({"worker": worker.url})
                response = web.StreamResponse(headers={"content-type": "text/event-stream"})
                await response.prepare(request)
                for part in (worker.url, worker.url, "[DONE]"):
                    await asyncio.sleep(chance.random() * 0.005)
                    await response.write(f"data: {part}\n\n".encode())
                return response
            finally:
                at_worker[key] -= 1

        return answer

    for worker in workers:
        worker.answer = answering(worker)
    answered = Counter[str]()

    async def client(number: int) -> None:
        streamed, stays = number % 2 == 0, number % 5 != 0
        call = router.post(CHAT_PATH, STREAM if streamed else CHAT)
        if not stays:
            with suppress(TimeoutError):
                await asyncio.wait_for(call, chance.random() * 0.02)
            return
        status, _, body = await call
        if status == 503:
            answered["refused"] += 1
            return
        answered["whole"] += 1
        if streamed:
            first, second, *rest = body.split(b"\n\n")
            assert status == 200 and first == second and rest == [b"data: [DONE]", b""], body
        else:
            assert status == 200 and set(msgspec.json.decode(body)) == {"worker"}, body

    settings: dict[str, Any] = {"hedge_after_secs": 0.005, "hedge_max_percent": 60.0, "cb_failure_threshold": 10_000}
    async with router_over(*workers, **settings) as router:
        for wave in range(6):
            await asyncio.gather(*(client(wave * 50 + number) for number in range(50)))
        await check_idle(router)
        await soon(lambda: not any(at_worker.values()))
        counts = result_counts(router)
        hedges = sum(counts.get(name, 0) for name in ("won", "lost", "failed", "abandoned"))
        assert 0 < hedges <= 300 * 0.6 and answered["whole"] > 200 and most == 1
        assert all(worker.breaker.state.name == "CLOSED" for worker in router.context.registry.targets())
