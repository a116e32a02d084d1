"""Limits of concurrency and rate, the queue, fair shares between tenants."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_lite.router.admission import Admission
from sglang_lite.router.errors import RouterError
from sglang_lite.router.options import RouterOptions, checked, parse_options
from sglang_lite.router.run import wait_idle
from sglang_lite.server.tenants import Tenant
from sglang_lite.types import StartupError
from tests.router.test_proxy import CHAT, CHAT_PATH, code_of
from tests.support.null_workers import NullWorker, router_over


class Gate(NullWorker):
    """A worker that answers when it is told to, and counts whom it has.

    Attributes:
        running, most: requests that it has, and had at once.
        order: the header ``x-tenant`` of requests as they came.
    """

    def __init__(self) -> None:
        super().__init__()
        self.open = asyncio.Semaphore(0)
        self.came = asyncio.Semaphore(0)
        self.running = self.most = 0
        self.order: list[str] = []
        self.answer = self._wait

    async def _wait(self, request: web.Request, data: bytes) -> web.StreamResponse:
        self.running += 1
        self.most = max(self.most, self.running)
        self.order.append(request.headers.get("x-tenant", ""))
        self.came.release()
        try:
            await self.open.acquire()
        finally:
            self.running -= 1
        return web.json_response({"usage": {"completion_tokens": 10}})


async def until(condition: Any) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.002)


async def test_as_many_run_as_may_and_the_rest_waits() -> None:
    worker = Gate()
    async with router_over(worker, max_concurrent_requests=2, queue_size=3) as router:
        admission = router.context.admission
        calls = [asyncio.create_task(router.post(CHAT_PATH, CHAT)) for _ in range(5)]
        await until(lambda: (admission.running, admission.waiting) == (2, 3))
        assert b"sgl_router_queued_requests 3.0" in (await router.get("/metrics"))[2]
        status, headers, body = await router.post(CHAT_PATH, CHAT)
        assert (status, code_of(body), headers["retry-after"]) == (429, "too_many_requests", "1")
        assert (await router.get("/workers"))[0] == 200, "the control plane has no queue"
        for _ in range(5):
            worker.open.release()
        assert [reply[0] for reply in await asyncio.gather(*calls)] == [200] * 5
        assert (worker.most, admission.running, admission.waiting) == (2, 0, 0)
        metrics = (await router.get("/metrics"))[2]
        assert b'smg_http_rate_limit_total{result="allowed"} 5.0' in metrics
        assert b'smg_http_rate_limit_total{result="rejected"} 1.0' in metrics


async def test_without_a_queue_the_second_is_sent_away() -> None:
    worker = Gate()
    async with router_over(worker, max_concurrent_requests=1, queue_size=0) as router:
        first = asyncio.create_task(router.post(CHAT_PATH, CHAT))
        await worker.came.acquire()
        assert (await router.post(CHAT_PATH, CHAT))[0] == 429
        worker.open.release()
        assert (await first)[0] == 200


async def test_waiting_ends() -> None:
    """By the time limit, and when the client leaves; neither takes a place along."""
    worker = Gate()
    async with router_over(worker, max_concurrent_requests=1, queue_timeout_secs=0.1) as router:
        admission = router.context.admission
        first = asyncio.create_task(router.post(CHAT_PATH, CHAT))
        await worker.came.acquire()
        status, headers, body = await router.post(CHAT_PATH, CHAT)
        assert (status, code_of(body), headers["retry-after"]) == (408, "queue_timeout", "1")
        assert (admission.running, admission.waiting) == (1, 0)
        worker.open.release()
        assert (await first)[0] == 200
        assert admission.running == 0


async def test_an_error_and_a_leaving_client_give_their_places_back() -> None:
    async with router_over(max_concurrent_requests=1) as router:
        for _ in range(3):
            assert (await router.post(CHAT_PATH, CHAT))[0] == 503
        assert (await router.post(CHAT_PATH, b"["))[0] == 400
        assert router.context.admission.running == 0
    admission = Admission(RouterOptions(max_concurrent_requests=1, queue_size=5))

    async def hold() -> None:
        async with admission.enter(Tenant(), 1):
            await asyncio.Event().wait()

    running = asyncio.create_task(hold())
    await until(lambda: admission.running == 1)
    waiting = [asyncio.create_task(hold()) for _ in range(2)]
    await until(lambda: admission.waiting == 2)
    running.cancel()
    await asyncio.sleep(0)  # the place is given to the first one that waits, which is cancelled in the same moment
    await asyncio.sleep(0)
    waiting[0].cancel()
    await asyncio.gather(running, waiting[0], return_exceptions=True)
    await until(lambda: (admission.running, admission.waiting) == (1, 0))
    waiting[1].cancel()
    await asyncio.gather(waiting[1], return_exceptions=True)
    assert (admission.running, admission.waiting) == (0, 0)


async def test_the_rate_is_kept() -> None:
    """The bucket holds a second's worth; then requests start as it fills."""
    now = asyncio.get_running_loop().time
    started: list[float] = []
    begun = now()
    admission = Admission(RouterOptions(rate_limit_tokens_per_second=50, queue_size=100), now)

    async def call() -> None:
        async with admission.enter(Tenant(), 1):
            started.append(now())

    await asyncio.gather(*(call() for _ in range(60)))
    earliest = [(place + 1 - 50) / 50 for place in range(60)]
    assert all(moment - begun >= first - 1e-6 for moment, first in zip(started, earliest, strict=True))
    assert admission.running == 0


@pytest.mark.parametrize("declared", [None, '{"gold": {"weight": 3, "api_key": "g"}, "silver": {"api_key": "s"}}'])
async def test_tenants_have_fair_shares(declared: str | None) -> None:
    """One that floods does not keep another waiting; weights count. A key says who calls, else the header."""
    worker = Gate()
    async with router_over(worker, max_concurrent_requests=1, queue_size=200, tenants=declared) as router:
        names = {"gold": "g", "silver": "s"}

        def call(name: str) -> asyncio.Task[Any]:
            headers = {"x-tenant": name}
            if declared:
                headers["authorization"] = f"Bearer {names[name]}"
            return asyncio.create_task(router.post(CHAT_PATH, CHAT, headers=headers))

        calls = [call("silver")]
        await worker.came.acquire()
        calls += [call("silver") for _ in range(40)]
        await until(lambda: router.context.admission.waiting == 40)
        calls += [call("gold") for _ in range(40)]
        await until(lambda: router.context.admission.waiting == 80)
        for _ in range(24):
            worker.open.release()
            await worker.came.acquire()
        counts = Counter(worker.order[1:])
        expected = 18 if declared else 12
        assert abs(counts["gold"] - expected) <= 1, counts
        for _ in calls:
            worker.open.release()
        assert {reply[0] for reply in await asyncio.gather(*calls)} == {200}


async def test_a_full_queue_makes_room_for_who_has_less_in_it() -> None:
    worker = Gate()
    async with router_over(worker, max_concurrent_requests=1, queue_size=4) as router:
        flood = [asyncio.create_task(router.post(CHAT_PATH, CHAT, headers={"x-tenant": "flood"})) for _ in range(5)]
        await until(lambda: router.context.admission.waiting == 4)
        small = asyncio.create_task(router.post(CHAT_PATH, CHAT, headers={"x-tenant": "small"}))
        await until(lambda: any(task.done() for task in flood))
        assert [task.result()[0] for task in flood if task.done()] == [429]
        assert (await router.post(CHAT_PATH, CHAT, headers={"x-tenant": "flood"}))[0] == 429
        for _ in range(5):
            worker.open.release()
        assert (await small)[0] == 200
        await asyncio.gather(*flood)
        assert worker.order.index("small") == 1


async def test_streams_are_charged_as_they_go() -> None:
    """A tenant with a long stream waits for one that drew nothing."""
    worker = NullWorker()

    async def answer(request: web.Request, data: bytes) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: x\n\n" * 100)
        return response

    worker.answer = answer
    async with router_over(worker, max_concurrent_requests=4) as router:
        charged = router.context.admission._counters
        assert (await router.post(CHAT_PATH, {**CHAT, "stream": True}, headers={"x-tenant": "a"}))[0] == 200
        assert charged.served[charged.slot("a", 1.0)] > 200
        worker.answer = None
        assert (await router.post(CHAT_PATH, CHAT, headers={"x-tenant": "b"}))[0] == 200
        assert charged.served[charged.slot("b", 1.0)] < 100


async def test_the_end_waits_for_those_who_wait() -> None:
    """With a rate limit requests may wait while none runs; a router that drains serves them."""
    async with router_over(NullWorker(), rate_limit_tokens_per_second=2) as router:
        admission = router.context.admission
        calls = [asyncio.create_task(router.post(CHAT_PATH, CHAT)) for _ in range(6)]
        await until(lambda: admission.waiting and not admission.running)
        await wait_idle(router.context, asyncio.Event(), 30)
        assert (admission.waiting, admission.running) == (0, 0)
        assert {reply[0] for reply in await asyncio.gather(*calls)} == {200}


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["enter", "leave", "cancel"]), st.integers(0, 2)), max_size=60),
    st.integers(1, 3),
    st.integers(0, 4),
)
def test_places_and_queue_never_leak(acts: list[tuple[str, int]], most: int, room: int) -> None:
    async def check() -> None:
        admission = Admission(RouterOptions(max_concurrent_requests=most, queue_size=room))
        leave: list[asyncio.Event] = []
        tasks: list[asyncio.Task[str]] = []

        async def call(tenant: int, event: asyncio.Event) -> str:
            try:
                async with admission.enter(Tenant(str(tenant), tenant + 1.0), 5):
                    await event.wait()
            except RouterError as error:
                return error.code
            return "served"

        for act, number in acts:
            if act == "enter":
                leave.append(asyncio.Event())
                tasks.append(asyncio.create_task(call(number, leave[-1])))
            elif tasks:
                place = number * 7 % len(tasks)
                if act == "leave":
                    leave[place].set()
                else:
                    tasks[place].cancel()
            if number:
                for _ in range(number * 2):
                    await asyncio.sleep(0)
            assert admission.running <= most and admission.waiting <= room
        for event in leave:
            event.set()
        results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 5)
        assert {result for result in results if isinstance(result, str)} <= {"served", "too_many_requests"}
        assert (admission.running, admission.waiting, admission._queues) == (0, 0, {})
        assert not admission._counters.waiting.any() and not admission._counters._running.any()

    asyncio.run(check())


def test_flags() -> None:
    words = ["--max-concurrent-requests", "7", "--queue-size", "0", "--queue-timeout-secs", "3"]
    options = parse_options([*words, "--rate-limit-tokens-per-second", "9"])
    assert (options.max_concurrent_requests, options.queue_size, options.queue_timeout_secs) == (7, 0, 3)
    assert options.rate_limit_tokens_per_second == 9
    for wrong in ({"max_concurrent_requests": -2}, {"queue_size": -1}, {"rate_limit_tokens_per_second": 0}):
        with pytest.raises(StartupError):
            checked(RouterOptions(**wrong))
    with pytest.raises(StartupError, match="at least 1"):
        Admission(RouterOptions(max_concurrent_requests=0))
    assert not Admission(RouterOptions()).is_limited
