"""Workers that speak gRPC: clients of the router see what they see of HTTP workers."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import pytest_asyncio

from sglang_lite.router.worker_routes import worker_id
from tests.router.test_migration import check_all_survive
from tests.support.grpc_server import GrpcClients, grpc_server
from tests.support.null_workers import RouterUnderTest, router_over

pytestmark = pytest.mark.asyncio(loop_scope="module")
CHAT = {"model": "chain", "temperature": 0, "max_tokens": 6, "messages": [{"role": "user", "content": "A"}]}
GENERATE = {"text": "A", "sampling_params": {"temperature": 0, "max_new_tokens": 6}}
TIMES = (
    "created",
    "created_at",
    "id",
    "rid",
    "request_id",
    "e2e_latency",
    "response_sent_to_client_ts",
    "completed_at",
    "item_id",
    "sequence_number",  # steps may be merged
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def worker(chain_model: Path) -> AsyncIterator[GrpcClients]:
    async with grpc_server(chain_model, page_size=1, max_total_tokens=8192, disable_radix_cache=True) as started:
        yield started


def url_of(worker: GrpcClients) -> str:
    return f"grpc://127.0.0.1:{worker.context.port}"


async def post(router: RouterUnderTest, path: str, body: Any, **headers: str) -> tuple[int, Any, bytes]:
    return await router.post(path, body, headers={"content-type": "application/json", **headers})


def comparable(value: Any) -> Any:
    """Without what differs from call to call."""
    if isinstance(value, dict):
        return {name: comparable(item) for name, item in value.items() if name not in TIMES}
    return [comparable(item) for item in value] if isinstance(value, list) else value


def events(body: bytes) -> list[tuple[list[bytes], Any]]:
    """The lines of every event, but for its data, and its data."""
    found = []
    for block in body.removesuffix(b"\n\n").split(b"\n\n"):
        *names, data = block.split(b"\n")
        assert data.startswith(b"data: "), block
        text = data.removeprefix(b"data: ")
        found.append((names, text if text == b"[DONE]" else comparable(msgspec.json.decode(text))))
    return found


CALLS = [
    ("/v1/chat/completions", CHAT),
    ("/v1/completions", {"model": "chain", "prompt": "A", "max_tokens": 6, "temperature": 0, "n": 2}),
    ("/v1/responses", {"model": "chain", "input": "A", "max_output_tokens": 6, "temperature": 0}),
    (
        "/v1/messages",
        {"model": "chain", "max_tokens": 6, "temperature": 0, "messages": [{"role": "user", "content": "A"}]},
    ),
    ("/generate", {**GENERATE, "return_logprob": True, "top_logprobs_num": 2}),
    ("/generate", {**GENERATE, "text": ["A", "B"]}),
]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        *CALLS,
        ("/v1/embeddings", {"model": "chain", "input": ["A", "BC"]}),
        ("/v1/score", {"model": "chain", "query": "A", "items": ["B", "C"], "label_token_ids": [65, 66]}),
        ("/tokenize", {"prompt": "ABC"}),
    ],
)
async def test_whole_bodies_are_those_of_an_http_worker(worker: GrpcClients, path: str, body: Any) -> None:
    async with router_over(urls=(url_of(worker),)) as by_grpc, router_over(urls=(worker.http.url,)) as by_http:
        replies = [await post(router, path, body) for router in (by_grpc, by_http)]
    (status, headers, got), (expected_status, expected_headers, expected) = replies
    assert status == expected_status == 200, got
    assert headers["content-type"].partition(";")[0] == expected_headers["content-type"].partition(";")[0]
    assert comparable(msgspec.json.decode(got)) == comparable(msgspec.json.decode(expected))


@pytest.mark.parametrize(("path", "body"), CALLS)
async def test_streams_are_those_of_an_http_worker(worker: GrpcClients, path: str, body: Any) -> None:
    async with router_over(urls=(url_of(worker),)) as by_grpc, router_over(urls=(worker.http.url,)) as by_http:
        replies = [await post(router, path, {**body, "stream": True}) for router in (by_grpc, by_http)]
    for status, headers, _ in replies:
        assert (status, headers["content-type"]) == (200, "text/event-stream")
        assert headers["cache-control"] == "no-cache"
    got, expected = (events(body) for _, _, body in replies)
    # Steps may be merged for a slow reader: what has to agree is the first event, the kinds and the end.
    assert [names for names, _ in got[:1]] == [names for names, _ in expected[:1]]
    assert {tuple(names) for names, _ in got} == {tuple(names) for names, _ in expected}
    assert got[-1] == expected[-1]
    assert (got[-1][1] == b"[DONE]") == (path not in ("/v1/responses", "/v1/messages"))
    if path == "/generate":
        assert got[-2] == expected[-2]


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/chat/completions", {**CHAT, "temperature": -1}, 400),
        ("/v1/chat/completions", {**CHAT, "temperature": -1, "stream": True}, 400),
        ("/generate", {"text": "A", "sampling_params": {"top_p": 0}}, 400),
        ("/v1/classify", {"model": "chain", "input": "A"}, 501),
        ("/v1/embeddings", {"model": "chain"}, 400),
    ],
)
async def test_errors_are_those_of_an_http_worker(worker: GrpcClients, path: str, body: Any, status: int) -> None:
    async with router_over(urls=(url_of(worker),)) as by_grpc, router_over(urls=(worker.http.url,)) as by_http:
        (got, kind, answer), (expected, _, same) = [await post(router, path, body) for router in (by_grpc, by_http)]
    assert (got, answer) == (expected, same)
    assert got == status and kind["content-type"].startswith("application/json")


async def idle(worker: GrpcClients) -> None:
    await worker.http.idle(3.0)
    assert worker.context.requests_in_flight == 0


async def test_a_client_that_leaves_ends_the_request_at_the_worker(worker: GrpcClients) -> None:
    long = {**GENERATE, "stream": True, "sampling_params": {"max_new_tokens": 1000, "ignore_eos": True}}
    async with router_over(urls=(url_of(worker),)) as router:
        async with router.session.post(router.url + "/generate", json=long) as response:
            await response.content.readuntil(b"\n\n")
            assert router.context.leases.total == 1
            response.close()
        await idle(worker)
        async with asyncio.timeout(2):
            while router.context.leases.total:
                await asyncio.sleep(0.005)
        task = asyncio.create_task(post(router, "/generate", {**long, "stream": False}))
        async with asyncio.timeout(20):
            while not worker.context.requests_in_flight:
                await asyncio.sleep(0.005)
        task.cancel()
        await idle(worker)


async def test_a_timeout_ends_the_request_at_the_worker(worker: GrpcClients) -> None:
    body = {**GENERATE, "sampling_params": {"max_new_tokens": 1000, "ignore_eos": True}}
    async with router_over(urls=(url_of(worker),), request_timeout_secs=0.05) as router:
        status, headers, _ = await post(router, "/generate", body)
        assert (status, headers["x-router-error-code"]) == (502, "upstream_timeout")
        await idle(worker)


async def test_control_calls_and_what_is_told_of_the_worker(worker: GrpcClients) -> None:
    async with router_over(urls=(url_of(worker),)) as router:
        shown = msgspec.json.decode((await router.get("/workers"))[2])["workers"][0]
        assert (shown["connection_mode"], shown["model_id"], shown["is_healthy"]) == ("grpc", "chain", True)
        assert router.context.registry.registered()[0].layout is not None
        loads = msgspec.json.decode((await router.get("/v1/loads"))[2])
        assert (loads["successful"], loads["failed"], loads["loads"][0]["load"]) == (1, 0, 0)
        flushed = msgspec.json.decode((await post(router, "/flush_cache", {}))[2])
        assert (flushed["success"], flushed["flushed_workers"]) == (True, 1)
        status, _, wrong = await post(router, "/pause_generation", {"mode": "sideways"})
        assert status == 400 and b"sideways" in wrong
        assert (await post(router, "/pause_generation", {"mode": "in_place"}))[0] == 200
        status, _, paused = await post(router, "/generate", GENERATE)
        assert status == 412, paused
        assert (await post(router, "/continue_generation", {}))[0] == 200
        aborted = msgspec.json.decode((await post(router, "/abort_request", {"rid": "nobody"}))[2])
        assert (aborted["aborted_workers"], aborted["success"]) == (0, False)
        info = msgspec.json.decode((await router.get("/model_info"))[2])
        assert info["served_model_name"] == "chain"


async def test_request_ids_reach_the_worker(worker: GrpcClients) -> None:
    async with router_over(urls=(url_of(worker),)) as by_grpc, router_over(urls=(worker.http.url,)) as by_http:
        for router in (by_grpc, by_http):
            _, headers, body = await post(router, "/v1/chat/completions", CHAT, **{"x-request-id": "mine"})
            assert (headers["x-request-id"], msgspec.json.decode(body)["id"]) == ("mine", "chatcmpl-mine")


async def test_a_worker_that_is_gone(chain_model: Path, worker: GrpcClients) -> None:
    """Its requests go to the other one; alone it is unreachable, and then known to be."""

    async def statuses(router: RouterUnderTest, count: int) -> set[int]:
        return {(await post(router, "/v1/chat/completions", CHAT))[0] for _ in range(count)}

    async with grpc_server(chain_model, max_total_tokens=1024) as second:
        gone = url_of(second)
        kept = {"policy": "round_robin", "health_check_interval_secs": 3600.0}
        both = router_over(urls=(url_of(worker), gone), **kept)
        alone = router_over(urls=(gone,), **kept)
        router, lonely = await both.__aenter__(), await alone.__aenter__()
        assert await statuses(router, 4) == {200}
    try:
        assert await statuses(router, 6) == {200}
        status, headers, body = await post(lonely, "/v1/chat/completions", CHAT)
        assert (status, headers["x-router-error-code"]) == (502, "upstream_unreachable")
        assert b"127.0.0.1" not in body
        (found,) = lonely.context.registry.workers.values()
        async with asyncio.timeout(10):
            while found.healthy and found.breaker.state.name == "CLOSED":  # until the router has noticed
                assert (await post(lonely, "/v1/chat/completions", CHAT))[0] in (502, 503)
        assert lonely.context.leases.total == router.context.leases.total == 0
    finally:
        await both.__aexit__(None, None, None)
        await alone.__aexit__(None, None, None)


async def test_many_clients_of_which_some_leave(worker: GrpcClients) -> None:
    """Everybody who stays gets all of an answer; of those who leave nothing stays, at the router or the worker."""
    body = {**GENERATE, "sampling_params": {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True}}
    whole = ("BCDA" * 10, 40)

    async def client(router: RouterUnderTest, number: int) -> None:
        streamed = number % 2 == 0
        async with router.session.post(router.url + "/generate", json={**body, "stream": streamed}) as response:
            if number % 3 == 0:
                if number % 4:
                    await response.content.readany()
                response.close()
                return
            data = await response.read()
        events = data.removesuffix(b"\n\n").split(b"\n\n") if streamed else [data, b"data: [DONE]"]
        assert events[-1] == b"data: [DONE]"
        last = msgspec.json.decode(events[-2].removeprefix(b"data: "))
        assert (last["text"], last["meta_info"]["completion_tokens"]) == whole

    async with router_over(urls=(url_of(worker),)) as router:
        await asyncio.gather(*(client(router, number) for number in range(120)))
        await idle(worker)
        async with asyncio.timeout(2):
            while router.context.leases.total:
                await asyncio.sleep(0.005)
        (found,) = router.context.registry.registered()
        assert found.load == 0 and found.breaker.state.name == "CLOSED"
        links = router.context.grpc_workers
        assert links is not None and [link.users for link in links._links.values()] == [0]
        await router.session.delete(f"{router.url}/workers/{worker_id(found)}")
        assert links._links == {}
        with pytest.raises(ConnectionError):
            router.context.request(found, "GET", "/health")


async def test_streams_go_on_at_another_worker(chain_model: Path) -> None:
    """The engine of one of two workers is killed: no client sees it."""
    before = set(psutil.Process().children(recursive=True))
    async with grpc_server(chain_model, grammar_backend="xgrammar") as one:
        cores = set(psutil.Process().children(recursive=True)) - before
        async with (
            grpc_server(chain_model, grammar_backend="xgrammar") as other,
            router_over(urls=(url_of(one), url_of(other)), policy="round_robin", migrate_streams=True) as router,
        ):

            def kill() -> None:
                for core in cores:
                    core.send_signal(signal.SIGKILL)

            await check_all_survive(router, kill)
