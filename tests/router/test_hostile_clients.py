"""What clients and workers may send to the router that breaks nothing: bodies, headers, publishers, prompts."""

from __future__ import annotations

import asyncio
import gzip
import logging
import os
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web

from sglang_lite.router import exchange
from sglang_lite.router.breaker import Breaker, BreakerLimits, BreakerState
from sglang_lite.router.context import RouterContext
from sglang_lite.router.grpc_worker import metadata_of
from sglang_lite.router.kv_wire import WrongEventsError, read_batch
from sglang_lite.router.lease import Lease
from sglang_lite.router.limited import stream_response
from sglang_lite.router.prefix_tree import PrefixTree
from sglang_lite.router.run import wait_idle
from tests.router.test_pairs_and_control import decode, prefill
from tests.router.test_proxy import CHAT, CHAT_PATH, code_of, fixed
from tests.support.null_workers import NullWorker, RouterUnderTest, router_over


@pytest.mark.parametrize("path", [CHAT_PATH, "/tokenize", "/flush_cache", "/v1/tokenize", "/workers"])
async def test_bodies_that_are_nested_too_deeply(path: str) -> None:
    async with router_over(NullWorker()) as router:
        status, _, body = await router.post(path, b'{"model":' + b"[" * 20_000)
        assert (status, code_of(body)) == (400, "bad_request")


async def test_token_ids_that_are_no_json_in_front_of_a_pair() -> None:
    """They are left to the worker to check, but a pair's fields depend on their number."""
    async with router_over(prefill(), decode()) as router:
        status, _, body = await router.post("/generate", b'{"input_ids":[1,,' + b"2," * 2_000 + b"2]}")
        assert (status, code_of(body)) == (400, "bad_request")


async def test_a_packed_body_arrives_unpacked_and_says_so() -> None:
    worker = NullWorker()
    async with router_over(worker) as router:
        packed = gzip.compress(msgspec.json.encode(CHAT))
        assert (await router.post(CHAT_PATH, packed, headers={"content-encoding": "gzip"}))[0] == 200
        _, headers, body = worker.seen[-1]
        assert "content-encoding" not in headers and msgspec.json.decode(body) == CHAT


async def raw(router: RouterUnderTest, *lines: str) -> bytes:
    """Status line of a chat request with these header lines."""
    host, _, port = router.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    body = msgspec.json.encode(CHAT)
    head = [f"POST {CHAT_PATH} HTTP/1.1", "host: x", f"content-length: {len(body)}", *lines, "", ""]
    writer.write("\r\n".join(head).encode() + body)
    try:
        async with asyncio.timeout(20):
            return await reader.readline()
    finally:
        writer.close()


async def test_headers_of_one_hop_end_here() -> None:
    worker = NullWorker()
    async with router_over(worker) as router:
        lines = ("connection: x-first", "connection: keep-alive, X-Second", "x-first: 1", "x-second: 2", "x-third: 3")
        assert b"200" in await raw(router, *lines, "proxy-connection: keep-alive")
        headers = worker.seen[-1][1]
        assert headers["x-third"] == "3" and not {"x-first", "x-second", "proxy-connection"} & set(headers)


def test_clients_do_not_choose_the_route_at_grpc_workers() -> None:
    kept = metadata_of({"X-Sgl-Route": "POST /update_weights_from_disk", "authorization": "Bearer k"})
    assert kept == [("authorization", "Bearer k")]


def test_events_that_are_nested_too_deeply() -> None:
    stored = b"\x97\xabBlockStored\x91\x01\xc0\xc0\x01" + b"\x91" * 100_000
    for event in (stored, b"\x91" * 100_000):
        with pytest.raises(WrongEventsError):
            read_batch(b"\x93\x01\x91" + event)


def test_workers_that_come_and_go_leave_nothing_in_the_tree() -> None:
    tree = PrefixTree(64 << 20)
    kept = [os.urandom(64) for _ in range(50)]
    for key in kept:
        tree.insert(key, 1)
    for _ in range(20):
        for _ in range(50):
            tree.insert(os.urandom(64), 0)
        tree.remove_worker(0)
    assert len(tree._leaves) == 50 and all(tree.match(key, 2) == (64, 2) for key in kept)


async def test_clients_that_leave_as_a_place_becomes_free() -> None:
    """The one whose turn comes has been cancelled in the same moment, and has not run since."""
    worker, go = NullWorker(), asyncio.Event()

    async def wait(request: web.Request, data: bytes) -> web.StreamResponse:
        await go.wait()
        return web.Response(body=b"{}")

    worker.answer = wait
    async with router_over(worker, max_concurrent_requests=1, queue_size=4) as router:
        admission = router.context.admission
        tenant = router.context.tenants.of_call({})
        held = asyncio.Event()

        async def enter(event: asyncio.Event) -> None:
            async with admission.enter(tenant, 1):
                await event.wait()

        first = asyncio.create_task(enter(held))
        await asyncio.sleep(0)
        waiting = [asyncio.create_task(enter(asyncio.Event())) for _ in range(4)]
        await asyncio.sleep(0)
        held.set()
        for task in waiting:
            task.cancel()
        await first
        await asyncio.gather(*waiting, return_exceptions=True)
        assert (admission.running, admission.waiting, admission._queues) == (0, 0, {})
        go.set()
        assert (await router.post(CHAT_PATH, CHAT))[0] == 200


async def test_room_is_made_although_the_newest_leaves() -> None:
    async with router_over(NullWorker(), max_concurrent_requests=1, queue_size=2) as router:
        admission, tenants = router.context.admission, router.context.tenants

        async def enter(name: str) -> None:
            async with admission.enter(tenants.of_call({"x-tenant": name}), 1):
                await asyncio.Event().wait()

        tasks = [asyncio.create_task(enter("many")) for _ in range(3)]
        await asyncio.sleep(0)
        tasks[2].cancel()
        few = asyncio.create_task(enter("few"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not few.done() and admission.waiting == 2
        for task in (*tasks, few):
            task.cancel()
        await asyncio.gather(*tasks, few, return_exceptions=True)
        assert (admission.running, admission.waiting) == (0, 0)


def test_many_short_prompts_take_no_more_memory_than_long_ones() -> None:
    tree = PrefixTree(1 << 20)
    for _ in range(10_000):
        tree.insert(os.urandom(16), 0)
    assert tree._nodes <= (1 << 20) // 320, "an edge costs some 300 bytes, however short it is"
    tree.remove_worker(0)
    assert (tree.size, tree._nodes, tree._leaves) == (0, 0, [])


async def test_what_was_sent_before_the_breaker_opened_is_no_probe() -> None:
    async with router_over(NullWorker()) as router:
        context = router.context
        worker = next(iter(context.registry.workers.values()))
        worker.breaker = breaker = Breaker(BreakerLimits(failures=1, cooldown=0.0))
        for verdict in (None, True, False):
            breaker.reset()
            async with Lease(context, worker) as old:
                async with Lease(context, worker) as other:
                    other.judge(False)
                assert breaker.state.name == "OPEN"
                probe = Lease(context, worker)
                await probe.__aenter__()
                if verdict is not None:
                    old.judge(verdict)
            assert breaker.state.name == "HALF_OPEN" and not breaker.allows(context.now)
            probe.judge(True)
            await probe.__aexit__(None, None, None)
            assert breaker.state.name == "CLOSED"


async def test_a_drain_waits_for_calls_that_no_worker_has_at_the_moment() -> None:
    """Between two attempts, and control calls, which count as no load."""
    worker, go = NullWorker(), asyncio.Event()
    worker.answer = fixed(503)
    async with router_over(worker, retry_initial_backoff_ms=60_000.0, retry_max_backoff_ms=60_000.0) as router:
        call = asyncio.create_task(router.post(CHAT_PATH, CHAT))
        async with asyncio.timeout(20):
            while not worker.seen or router.context.leases.total:
                await asyncio.sleep(0.01)
        draining = asyncio.create_task(wait_idle(router.context, asyncio.Event(), 60))
        await asyncio.sleep(0.1)
        assert not draining.done()
        call.cancel()
        await asyncio.wait_for(draining, 5)

        async def wait(request: web.Request, data: bytes) -> web.StreamResponse:
            await go.wait()
            return web.Response(body=b"{}")

        worker.answer = wait
        call = asyncio.create_task(router.post("/update_weights_from_disk", {"model_path": "p"}))
        async with asyncio.timeout(20):
            while not worker.count("/update_weights_from_disk"):
                await asyncio.sleep(0.01)
        draining = asyncio.create_task(wait_idle(router.context, asyncio.Event(), 60))
        await asyncio.sleep(0.1)
        assert not draining.done()
        go.set()
        assert (await call)[0] == 200
        await asyncio.wait_for(draining, 5)


async def test_one_address_in_several_spellings_is_one_worker() -> None:
    async with router_over() as router:
        assert (await router.post("/workers", {"url": "http://Host.Example:1/"}))[0] == 202
        for url in ("http://host.example:1", "HTTP://HOST.example:1"):
            status, _, body = await router.post("/workers", {"url": url})
            assert (status, code_of(body)) == (400, "bad_request")
        odd = (
            "http://u:secret@host:1",
            "http://a b:1",
            "http://a:1/\r\nx: y",
            "http://\u00e9:1",
            "http://[::1",
            "http://a\0",
        )
        for url in ("http://host:99999", "http://host:0", "http://host:x", "GRPC://host", *odd):
            status, _, body = await router.post("/workers", {"url": url})
            assert status == 400 and b"secret" not in body, url
        assert list(router.context.registry.workers) == ["http://host.example:1"]


@pytest.mark.parametrize(
    "fields", [{"api_key": "a\r\nx: y"}, {"api_key": "a\n"}, {"api_key": "\u00e9"}, {"bootstrap_port": 0}]
)
async def test_what_no_header_can_hold_is_no_worker(fields: dict[str, object]) -> None:
    async with router_over() as router:
        status, _, body = await router.post("/workers", {"url": "http://host:1", **fields})
        assert (status, code_of(body)) == (400, "bad_request")
        assert not router.context.registry.workers


async def test_a_fault_leaves_no_worker_unwatched(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    learn, faults = RouterContext.learn, 2

    def odd(context: RouterContext, *said: Any) -> None:
        nonlocal faults
        faults -= 1
        if faults >= 0:
            raise KeyError("odd")
        learn(context, *said)

    monkeypatch.setattr(RouterContext, "learn", odd)
    async with router_over(NullWorker(), worker_startup_check_interval=0.01) as router:
        assert (await router.post("/generate", {"text": "A"}))[0] == 200
    assert "fault while looking after worker" in caplog.text


@pytest.mark.parametrize(("path", "body"), [("/v1/tokenize", {"prompt": "a"}), ("/tokenize", {"prompt": "a"})])
async def test_small_work_is_json_whatever_the_client_called_it(path: str, body: dict[str, str]) -> None:
    worker = NullWorker()
    async with router_over(worker) as router:
        await router.post(path, body, headers={"content-type": "application/x-www-form-urlencoded"})
        assert worker.seen[-1][1]["content-type"] == "application/json"


async def test_broken_requests_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    worker = NullWorker()
    async with router_over(worker) as router:
        for _ in range(3):
            assert b"400" in await raw(router, "x{}: 1")
        assert b"200" in await raw(router)
    assert "Traceback" not in caplog.text and "x{}" not in caplog.text
    assert sum(len(record.getMessage()) for record in caplog.records if record.levelno > logging.INFO) < 1000


@pytest.mark.parametrize("options", [{}, {"hedge_after_secs": 60.0}, {"migrate_streams": True}])
async def test_a_client_that_leaves_as_its_stream_begins(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says nothing about the worker, and nobody else gets the request."""

    def leave(request: web.Request, status: int, headers: dict[str, str]) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.abort()
        return stream_response(request, status, headers)

    monkeypatch.setattr(exchange, "stream_response", leave)
    workers = NullWorker(), NullWorker()

    async def stream(request: web.Request, data: bytes) -> web.StreamResponse:
        headers = {"content-type": "text/event-stream", "x-sgl-resumable": "1"}
        return web.Response(body=b"data: a\n\n:sgl {}\n\n", headers=headers)

    for worker in workers:
        worker.answer = stream
    async with router_over(*workers, cb_failure_threshold=1, **options) as router:
        with pytest.raises(aiohttp.ClientError):
            await router.post(CHAT_PATH, {**CHAT, "stream": True})
        async with asyncio.timeout(20):
            while router.context.serving:
                await asyncio.sleep(0.005)
        assert [worker.breaker.state for worker in router.context.registry.targets()] == [BreakerState.CLOSED] * 2
        assert sum(worker.count(CHAT_PATH) for worker in workers) == 1
