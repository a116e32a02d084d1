"""One side of a pair fails: what the client gets, and that the other side's request ends."""

from __future__ import annotations

import asyncio
import time

import aiohttp
import pytest
from aiohttp import web

from tests.router.test_pairs_and_control import decode, prefill
from tests.router.test_proxy import CHAT, CHAT_PATH, code_of, fixed
from tests.support.null_workers import NullWorker, router_over


class Held(NullWorker):
    """Answers nothing; ``ended`` are the times at which its requests ended."""

    def __init__(self, mode: str) -> None:
        super().__init__(disaggregation_mode=mode, disaggregation_bootstrap_port=8998)
        self.ended: list[float] = []
        self.answer = self._hold

    async def _hold(self, request: web.Request, data: bytes) -> web.StreamResponse:
        try:
            await asyncio.Event().wait()
        finally:
            self.ended.append(time.monotonic())
        raise AssertionError("unreachable")


async def drop(request: web.Request, data: bytes) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def until_ended(worker: Held, since: float) -> None:
    async with asyncio.timeout(5):
        while not worker.ended:
            await asyncio.sleep(0.01)
    assert worker.ended[0] - since < 2.0  # one, and what a busy machine adds


@pytest.mark.parametrize(("answer", "status"), [(fixed(500), 500), (fixed(503), 503), (drop, 502), (fixed(429), 429)])
async def test_prefill_fails_while_decode_waits(answer, status: int) -> None:  # type: ignore[no-untyped-def]
    one, other = prefill(), Held("decode")
    one.answer = answer
    async with router_over(one, other, disable_retries=True) as router:
        start = time.monotonic()
        async with asyncio.timeout(10):
            assert (await router.post(CHAT_PATH, CHAT))[0] == status
        await until_ended(other, start)
        assert router.context.leases.total == 0


@pytest.mark.parametrize("answer", [fixed(500), fixed(503), drop])
async def test_decode_fails_while_prefill_computes(answer) -> None:  # type: ignore[no-untyped-def]
    one, other = Held("prefill"), decode()
    other.answer = answer
    async with router_over(one, other, disable_retries=True) as router:
        start = time.monotonic()
        async with asyncio.timeout(10):
            assert (await router.post(CHAT_PATH, CHAT))[0] in (500, 502, 503)
        await until_ended(one, start)
        assert router.context.leases.total == 0


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("answer", [fixed(503), drop])
async def test_another_worker_of_that_side_takes_over(side: str, answer) -> None:  # type: ignore[no-untyped-def]
    """Also where the policy would choose the same pair again: it holds the beginning of the prompt."""
    bad, good, rest = (prefill(), prefill(), decode()) if side == "prefill" else (decode(), decode(), prefill())
    bad.answer = good.answer = fixed(200)
    async with router_over(bad, good, rest) as router:
        while not bad.seen:
            assert (await router.post(CHAT_PATH, CHAT))[0] == 200
            bad, good = (bad, good) if bad.seen else (good, bad)
        bad.answer = answer
        if side == "prefill":
            gone = asyncio.Event()

            async def wait(request: web.Request, data: bytes) -> web.StreamResponse:
                if not gone.is_set():
                    gone.set()
                    await asyncio.Event().wait()
                return web.Response(body=b"{}")

            rest.answer = wait
        async with asyncio.timeout(10):
            assert (await router.post(CHAT_PATH, CHAT))[0] == 200
        assert good.seen


async def test_a_probe_that_another_request_has_is_no_answer() -> None:
    """Both calls see that the breaker may be probed; the one that comes second goes elsewhere."""
    pairs = [prefill(), prefill()], [decode(), decode()]
    async with router_over(*pairs[0], *pairs[1], cb_failure_threshold=1, cb_timeout_duration_secs=0.05) as router:
        for worker in router.context.registry.workers.values():
            worker.breaker.fail(router.context.now)
        await asyncio.sleep(0.1)
        answers = await asyncio.gather(*(router.post(CHAT_PATH, CHAT) for _ in range(2)))
        assert [answer[0] for answer in answers] == [200, 200], [code_of(one[2]) for one in answers if one[0] != 200]


async def test_a_client_that_leaves_while_prefill_is_waited_for() -> None:
    one, other = Held("prefill"), decode()

    async def stream(request: web.Request, data: bytes) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: [DONE]\n\n")
        return response

    other.answer = stream
    async with router_over(one, other) as router, aiohttp.ClientSession() as session:
        answer = await session.post(router.url + CHAT_PATH, json={**CHAT, "stream": True})
        await answer.content.readany()
        await asyncio.sleep(0.1)  # decode is done, and the answer of prefill is waited for
        answer.close()
        await until_ended(one, time.monotonic())
        async with asyncio.timeout(5):
            while router.context.leases.total:
                await asyncio.sleep(0.01)
