"""Several front processes on one port: whatever a client asks, it does not matter which of them answers."""

from __future__ import annotations

import asyncio
import re
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from tests.support.server import Reply, ServerProcess, greedy

FRONTS = 3
OPTIONS = ("--enable-metrics", "--enable-response-store", "--max-concurrent-requests", "16")

TURNS = 12
"""Connections of their own: that all of them reach the same front of three has a probability of 1 in 177,147."""


@pytest.fixture(scope="module")
def fronts(chain_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with serving(chain_model, tmp_path_factory.mktemp("fronts")) as started:
        yield started


def serving(model: Path, folder: Path, *more: str) -> ServerProcess:
    words = ["--model-path", str(model), "--served-model-name", "chain", "--max-total-tokens", "65536"]
    server = ServerProcess(
        [*words, *OPTIONS, *more, "--tokenizer-worker-num", str(FRONTS), "--drain-timeout", "10"], folder / "log"
    )
    try:
        server.wait_ready()
        wait_for_line(server, "ready to roll")
    except BaseException:
        server.__exit__(None, None, None)
        raise
    return server


def wait_for_line(server: ServerProcess, text: str) -> None:
    """The first front answers before the others do."""
    deadline = time.monotonic() + 60
    while text not in server.output:
        assert server.process.poll() is None, server.output
        assert time.monotonic() < deadline, server.output
        time.sleep(0.05)


async def call(server: ServerProcess, path: str, json: Any = None, method: str = "POST") -> Reply:
    """Over a connection of its own."""
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, server.url + path, json=json) as response,
    ):
        return Reply(response.status, response.headers, await response.read())


@asynccontextmanager
async def endless(
    server: ServerProcess, request_id: str, replica: int | None = None
) -> AsyncIterator[aiohttp.ClientResponse]:
    """A stream that has begun."""
    body = greedy("A", {"max_new_tokens": 1000}, stream=True, rid=request_id, routed_dp_rank=replica)
    async with aiohttp.ClientSession() as session, session.post(f"{server.url}/generate", json=body) as response:
        await response.content.readuntil(b"\n\n")
        yield response


def front_processes(server: ServerProcess) -> list[psutil.Process]:
    children = psutil.Process(server.process.pid).children(recursive=True)
    return [child for child in children if "sglang_lite.server.front_process" in child.cmdline()]


def core_processes(server: ServerProcess) -> list[psutil.Process]:
    """In the order in which they were started."""
    children = psutil.Process(server.process.pid).children(recursive=True)
    cores = [child for child in children if "sglang_lite.engine.process" in child.cmdline()]
    return sorted(cores, key=lambda process: process.create_time())


def total(text: str, name: str) -> float:
    return sum(float(value) for value in re.findall(rf"^sglang:{name}(?:\{{.*\}})? (\S+)$", text, re.MULTILINE))


async def finished(server: ServerProcess) -> float:
    return total((await call(server, "/metrics", method="GET")).text, "num_requests_total")


async def test_all_answer_and_metrics_count_all_of_them(fronts: ServerProcess) -> None:
    assert len(front_processes(fronts)) == FRONTS - 1
    before = await finished(fronts)
    replies = await asyncio.gather(*(call(fronts, "/generate", greedy("a")) for _ in range(TURNS)))
    assert {reply.json()["text"] for reply in replies} == {"é🙂!"}
    counts = {await finished(fronts) - before for _ in range(TURNS)}
    assert counts == {TURNS}
    pages = {total((await call(fronts, "/metrics", method="GET")).text, "num_pages") for _ in range(TURNS)}
    assert pages == {4096}


async def test_streams_of_all_fronts_share_the_engine(fronts: ServerProcess) -> None:
    body = {"model": "chain", "prompt": "A", "max_tokens": 60, "temperature": 0, "stream": True}
    replies = await asyncio.gather(*(call(fronts, "/v1/completions", body) for _ in range(TURNS)))
    for reply in replies:
        events = reply.events
        assert events[-1] == "[DONE]"
        assert "".join(event["choices"][0]["text"] for event in events[:-1]) == "BCDA" * 15


async def test_an_abort_finds_the_request_wherever_it_runs(fronts: ServerProcess) -> None:
    for turn in range(TURNS):
        async with endless(fronts, f"abort-{turn}") as stream:
            assert (await call(fronts, "/abort_request", {"rid": f"abort-{turn}"})).json()["success"] is True
            rest = await stream.content.read()
        assert b'"type":"abort"' in rest
    assert (await call(fronts, "/abort_request", {"rid": "nobody"})).json()["success"] is False


async def test_an_id_in_flight_is_taken_for_all_fronts(fronts: ServerProcess) -> None:
    async with endless(fronts, "only-once") as stream:
        for _ in range(TURNS):
            reply = await call(fronts, "/generate", {**greedy("a"), "rid": "only-once"})
            assert (reply.status, "Duplicate request ID" in reply.text) == (400, True)
        assert (await call(fronts, "/abort_request", {"rid": "only-once"})).json()["success"] is True
        await stream.content.read()
    for _ in range(TURNS):
        assert (await call(fronts, "/generate", {**greedy("a"), "rid": "only-once"})).status == 200


async def test_requests_are_limited_over_all_fronts(fronts: ServerProcess) -> None:
    async with AsyncExitStack() as stack:
        streams = [await stack.enter_async_context(endless(fronts, f"limit-{number}")) for number in range(16)]
        assert {stream.status for stream in streams} == {200}
        for _ in range(TURNS):
            reply = await call(fronts, "/generate", greedy("a"))
            assert (reply.status, reply.headers["Retry-After"]) == (503, "1")
        assert (await call(fronts, "/abort_request", {"abort_all": True})).status == 200
        for stream in streams:
            await stream.content.read()
    replies = await asyncio.gather(*(call(fronts, "/generate", greedy("a")) for _ in range(TURNS)))
    assert {reply.status for reply in replies} == {200}


async def test_stored_responses_go_on_at_any_front(fronts: ServerProcess) -> None:
    body = {"model": "chain", "input": "A", "max_output_tokens": 4, "temperature": 0}
    first = (await call(fronts, "/v1/responses", {**body, "rid": "resp_first"})).json()
    assert first["store"] is True
    lengths = set()
    for _ in range(TURNS):
        again = await call(fronts, "/v1/responses", {**body, "rid": "resp_first"})
        assert (again.status, "stored already" in again.text) == (400, True)
        assert (await call(fronts, "/v1/responses/resp_first", method="GET")).json() == first
        reply = await call(fronts, "/v1/responses", {**body, "previous_response_id": "resp_first"})
        assert reply.status == 200, reply.text
        lengths.add(reply.json()["usage"]["input_tokens"])
        unknown = await call(fronts, "/v1/responses", {**body, "previous_response_id": "resp_nobody"})
        assert unknown.status == 404
        assert (await call(fronts, "/peer/conversations/resp_first", method="GET")).status == 404
    (length,) = lengths
    assert length > first["usage"]["input_tokens"]


async def test_what_became_of_a_request_is_known_to_all(fronts: ServerProcess) -> None:
    assert (await call(fronts, "/generate", {**greedy("a"), "rid": "where-was-it"})).status == 200
    for _ in range(TURNS):
        reply = await call(fronts, "/v1/requests/where-was-it", method="GET")
        assert reply.status == 200, reply.text
        assert len(reply.json()["sequences"]) == 1
    assert (await call(fronts, "/v1/requests/nobody", method="GET")).status == 404


async def test_a_pause_holds_for_all_fronts(fronts: ServerProcess) -> None:
    assert (await call(fronts, "/pause_generation", {"mode": "abort"})).status == 200
    refused = [(await call(fronts, "/generate", greedy("a"))).status for _ in range(TURNS)]
    assert set(refused) == {412}
    assert (await call(fronts, "/continue_generation", {})).status == 200
    served = [(await call(fronts, "/generate", greedy("a"))).status for _ in range(TURNS)]
    assert set(served) == {200}


async def test_fronts_agree_after_pauses_that_cross(fronts: ServerProcess) -> None:
    """Which call comes last is a matter of luck, but it is the same one for all fronts and the core."""
    for _ in range(8):
        paths = ("/pause_generation", "/continue_generation") * 3
        replies = await asyncio.gather(*(call(fronts, path, {}) for path in paths))
        assert {reply.status for reply in replies} == {200}
        ready = {(await call(fronts, "/ready", method="GET")).status for _ in range(TURNS)}
        async with asyncio.timeout(10):
            served = {(await call(fronts, "/generate", greedy("a"))).status for _ in range(TURNS)}
        assert (ready, served) in (({200}, {200}), ({503}, {412}))
    assert (await call(fronts, "/continue_generation", {})).status == 200


async def test_any_front_flushes_the_cache(fronts: ServerProcess) -> None:
    for _ in range(TURNS):
        assert (await call(fronts, "/generate", greedy("A", {"max_new_tokens": 4}))).status == 200
        assert (await call(fronts, "/flush_cache")).status == 200
        assert (await call(fronts, "/generate", greedy("A", {"max_new_tokens": 4}))).json()["meta_info"][
            "cached_tokens"
        ] == 0


async def test_adapters_and_sessions_are_for_servers_with_one_front(fronts: ServerProcess) -> None:
    for path, body in (
        ("/load_lora_adapter", {"lora_name": "x", "lora_path": "/nowhere"}),
        ("/open_session", {"capacity_of_str_len": 10}),
        ("/set_internal_state", {"server_args": {}}),
    ):
        reply = await call(fronts, path, body)
        assert reply.status == 501
        assert "--tokenizer-worker-num 1" in reply.text


async def test_a_signal_ends_all_of_them_after_what_runs(chain_model: Path, tmp_path: Path) -> None:
    with serving(chain_model, tmp_path) as server:
        family = psutil.Process(server.process.pid).children(recursive=True)
        body = greedy("A", {"max_new_tokens": 900})
        running = [asyncio.create_task(call(server, "/generate", body)) for _ in range(6)]
        while total((await call(server, "/metrics", method="GET")).text, "num_running_reqs") < 6:
            assert not any(task.done() for task in running)
        server.process.send_signal(signal.SIGTERM)
        replies = await asyncio.gather(*running)
        assert {reply.status for reply in replies} == {200}
        assert {reply.json()["meta_info"]["finish_reason"]["type"] for reply in replies} == {"length"}
        assert await asyncio.to_thread(server.wait_exit, 15) == 0
    assert not [process for process in family if process.is_running()]


async def test_the_death_of_one_front_ends_the_server(chain_model: Path, tmp_path: Path) -> None:
    with serving(chain_model, tmp_path) as server:
        family = psutil.Process(server.process.pid).children(recursive=True)
        front_processes(server)[0].kill()
        assert await asyncio.to_thread(server.wait_exit, 15) == 3
        assert "ended by itself" in server.output
    assert not [process for process in family if process.is_running()]


async def test_fronts_share_replicas_and_go_on_without_one(chain_model: Path, tmp_path: Path) -> None:
    with serving(chain_model, tmp_path, "--dp-size", "2") as server:
        fronts = front_processes(server)
        served = [await call(server, "/generate", {**greedy("a"), "routed_dp_rank": turn % 2}) for turn in range(TURNS)]
        assert {reply.status for reply in served} == {200}
        assert {reply.json()["text"] for reply in served} == {"é🙂!"}
        loads = (await call(server, "/v1/loads", method="GET")).json()["loads"]
        assert [load["dp_rank"] for load in loads] == [0, 1]
        async with endless(server, "only-once"):
            taken = [await call(server, "/generate", {**greedy("a"), "rid": "only-once"}) for _ in range(TURNS)]
            assert {reply.status for reply in taken} == {400}
            assert (await call(server, "/abort_request", {"rid": "only-once"})).json()["success"] is True

        async with AsyncExitStack() as stack:
            streams = [await stack.enter_async_context(endless(server, f"dies-{turn}", 1)) for turn in range(6)]
            core_processes(server)[1].kill()
            for stream in streams:  # whichever front serves it, the stream ends and says why
                assert b"replica 1 is gone" in await stream.content.read()
        assert [one.is_running() for one in fronts] == [True] * len(fronts)
        for _ in range(TURNS):
            assert (await call(server, "/generate", greedy("a"))).status == 200
            named = await call(server, "/generate", {**greedy("a"), "routed_dp_rank": 1})
            assert (named.status, "replica 1 is gone" in named.text) == (500, True)
