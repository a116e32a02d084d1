"""The router in front of workers without a model (C901 to C913, C928, C931)."""

from __future__ import annotations

import asyncio
import re

import msgspec
import pytest
from aiohttp import web

from tests.support.null_workers import Answer, NullWorker, router_over

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
CHAT_PATH = "/v1/chat/completions"


def fixed(status: int, body: bytes = b"{}", kind: str = "application/json") -> Answer:
    async def answer(request: web.Request, data: bytes) -> web.StreamResponse:
        return web.Response(status=status, body=body, headers={"content-type": kind})

    return answer


async def hang(request: web.Request, data: bytes) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError("unreachable")


def code_of(body: bytes) -> str:
    error = msgspec.json.decode(body)["error"]
    assert set(error) == {"type", "code", "message"}
    return str(error["code"])


@pytest.mark.parametrize("status", [400, 429, 500])
async def test_errors_of_workers_pass_through(status: int) -> None:
    """C901."""
    worker = NullWorker()
    worker.answer = fixed(status, b"say so", "text/x-odd")
    async with router_over(worker) as router:
        got, headers, body = await router.post(CHAT_PATH, CHAT)
        assert (got, body, headers["content-type"]) == (status, b"say so", "text/x-odd")


async def test_nobody_there_and_unknown_models() -> None:
    """C902, C931."""
    async with router_over() as router:
        status, headers, body = await router.post(CHAT_PATH, CHAT)
        assert (status, code_of(body), headers["x-router-error-code"]) == (503, *["no_healthy_workers"] * 2)
        assert (await router.get("/healthz"))[0] == 200
        assert (await router.get("/readyz"))[0] == 503
        worker = NullWorker()
        await worker.server.start_server()
        try:
            assert (await router.post("/workers", {"url": worker.url}))[0] == 202
            await router.registered(1)
            assert (await router.get("/readyz"))[0] == 200
            status, _, body = await router.post(CHAT_PATH, {**CHAT, "model": "other"})
            assert (status, code_of(body)) == (404, "model_not_found")
        finally:
            await worker.server.close()


async def test_a_worker_that_is_gone_or_hangs() -> None:
    """C902: no address of a worker is told."""
    worker = NullWorker()
    async with router_over(worker, request_timeout_secs=0.2) as router:
        worker.answer = hang
        started = asyncio.get_running_loop().time()
        status, _, body = await router.post(CHAT_PATH, CHAT)
        assert (status, code_of(body)) == (502, "upstream_timeout")
        assert asyncio.get_running_loop().time() - started < 1
        url = worker.url
        await worker.server.close()
        status, _, body = await router.post(CHAT_PATH, CHAT)
        assert (status, code_of(body)) == (502, "upstream_unreachable")
        assert url.encode() not in body and url.rpartition(":")[2].encode() not in body
        assert router.context.leases.total == 0


@pytest.mark.parametrize("body", [b"null", b"[]", b'"x"', b"{", b"\xff"])
async def test_bodies_that_are_no_objects(body: bytes) -> None:
    """C903."""
    worker = NullWorker()
    async with router_over(worker) as router:
        status, _, answer = await router.post(CHAT_PATH, body)
        assert (status, code_of(answer), worker.seen) == (400, "bad_request", [])


async def test_large_bodies() -> None:
    """C904."""
    async with router_over(NullWorker()) as router:
        status, _, answer = await router.post(CHAT_PATH, {**CHAT, "x": "y" * (1 << 20)})
        assert (status, code_of(answer)) == (413, "payload_too_large")


async def test_streams_pass_through_as_they_come() -> None:
    """C906: the first part is there before the worker has ended; streams are not mixed."""
    worker = NullWorker()
    go_on = asyncio.Event()

    async def answer(request: web.Request, data: bytes) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        mark = msgspec.json.decode(data)["mark"]
        await response.write(b"data: %d\n\n" % mark)
        await go_on.wait()
        await response.write(b"data: %d\n\ndata: [DONE]\n\n" % mark)
        return response

    worker.answer = answer
    async with router_over(worker) as router:

        async def client(mark: int) -> None:
            body = {**CHAT, "stream": True, "mark": mark}
            async with router.session.post(router.url + CHAT_PATH, json=body) as response:
                assert response.content_type == "text/event-stream"
                first = await response.content.readuntil(b"\n\n")
                assert first == b"data: %d\n\n" % mark
                arrived.append(mark)
                if len(arrived) == 20:
                    go_on.set()
                assert await response.read() == first + b"data: [DONE]\n\n"

        arrived: list[int] = []
        await asyncio.gather(*(client(mark) for mark in range(20)))
        assert router.context.leases.total == 0


async def test_a_stream_that_breaks_ends_with_an_error() -> None:
    worker = NullWorker()

    async def answer(request: web.Request, data: bytes) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: 1\n\n")
        assert request.transport is not None
        request.transport.abort()
        return response

    worker.answer = answer
    async with router_over(worker, cb_failure_threshold=1) as router:
        status, _, body = await router.post(CHAT_PATH, {**CHAT, "stream": True})
        assert status == 200 and body.startswith(b"data: 1\n\n") and b"[DONE]" not in body
        assert b'"code":"upstream_unreachable"' in body
        assert len(worker.seen) == 1
        assert code_of((await router.post(CHAT_PATH, CHAT))[2]) == "breaker_open"


async def test_headers_and_request_ids() -> None:
    """C907, C908."""
    worker = NullWorker()
    kept = {
        "authorization": "Bearer k",
        "x-sgl-route-key": "a",
        "x-smg-routing-key": "b",
        "x-data-parallel-rank": "0",
        "x-request-id": "mine",
    }
    async with router_over(worker) as router:
        _, headers, _ = await router.post(CHAT_PATH, CHAT, headers={**kept, "cookie": "c=1"})
        seen = worker.seen[0][1]
        assert {name: seen[name] for name in kept} == kept
        assert "cookie" not in seen and "transfer-encoding" not in seen
        assert seen["host"] == worker.url.removeprefix("http://")
        assert headers["x-request-id"] == "mine"
        for path, prefix in (("/generate", "gnt"), (CHAT_PATH, "chatcmpl"), ("/v1/completions", "cmpl")):
            _, headers, _ = await router.post(path, {})
            assert re.fullmatch(prefix + "-[A-Za-z0-9]{24}", headers["x-request-id"])
            assert worker.seen[-1][1]["x-request-id"] == headers["x-request-id"]


async def test_the_breaker_lets_one_probe_through() -> None:
    """C911, C912."""
    worker = NullWorker()
    worker.answer = fixed(500)
    options = {"disable_retries": True, "cb_timeout_duration_secs": 0.0}
    async with router_over(worker, **options) as router:
        breaker = router.context.registry.workers[worker.url].breaker
        for _ in range(3):
            assert (await router.post(CHAT_PATH, CHAT))[0] == 500
        entered, leave = asyncio.Event(), asyncio.Event()

        async def slow(request: web.Request, data: bytes) -> web.StreamResponse:
            entered.set()
            await leave.wait()
            return web.json_response({})

        worker.answer = slow
        probe = asyncio.create_task(router.post(CHAT_PATH, CHAT))
        await entered.wait()
        assert breaker.state.name == "HALF_OPEN"
        assert code_of((await router.post(CHAT_PATH, CHAT))[2]) == "breaker_open"
        assert (await router.get("/workers"))[0] == (await router.get("/readyz"))[0] == 200
        leave.set()
        assert (await probe)[0] == 200
        assert breaker.state.name == "CLOSED"


async def test_the_other_worker_takes_over() -> None:
    """C913."""
    first, second = NullWorker(), NullWorker()
    async with router_over(first, second, policy="round_robin") as router:
        await first.server.close()
        for _ in range(10):
            status, _, body = await router.post(CHAT_PATH, CHAT)
            assert (status, msgspec.json.decode(body)["worker"]) == (200, second.url)


async def test_stale_requests_expire() -> None:
    """C928."""
    worker = NullWorker()
    worker.answer = hang
    async with router_over(worker, stale_request_timeout_secs=0.1) as router:
        status, _, body = await router.post(CHAT_PATH, CHAT)
        assert (status, code_of(body)) == (504, "stale_request_expired")
        assert router.context.leases.total == 0 == router.context.registry.workers[worker.url].load
        assert b"sgl_router_stale_requests_total 1.0" in (await router.get("/metrics"))[2]


async def test_a_client_that_leaves_frees_its_lease() -> None:
    worker = NullWorker()
    entered = asyncio.Event()

    async def wait(request: web.Request, data: bytes) -> web.StreamResponse:
        entered.set()
        return await hang(request, data)

    worker.answer = wait
    async with router_over(worker) as router:
        client = asyncio.create_task(router.post(CHAT_PATH, CHAT))
        await entered.wait()
        client.cancel()
        async with asyncio.timeout(2):
            while router.context.leases.total:
                await asyncio.sleep(0.005)
        assert router.context.registry.workers[worker.url].breaker.state.name == "CLOSED"


async def test_keys() -> None:
    async with router_over(NullWorker(), api_key="k") as router:
        assert code_of((await router.post(CHAT_PATH, CHAT))[2]) == "unauthorized"
        assert (await router.post(CHAT_PATH, CHAT, headers={"authorization": "Bearer k"}))[0] == 200
        assert (await router.get("/workers"))[0] == 401
        assert (await router.get("/metrics"))[0] == (await router.get("/healthz"))[0] == 200
