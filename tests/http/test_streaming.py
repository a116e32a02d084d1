"""Streams: events, back-pressure, disconnects, aborts, pauses (acceptance section 5)."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest

from tests.support.server import LocalServer, greedy, local_server, read_event


@asynccontextmanager
async def stream(server: LocalServer, body: dict[str, Any], path: str = "/generate") -> AsyncIterator[Any]:
    """An open stream; leaving the block closes the connection."""
    connector = aiohttp.TCPConnector(force_close=True)
    async with aiohttp.ClientSession(connector=connector) as session:
        response = await session.post(server.url + path, json={**body, "stream": True})
        try:
            yield response
        finally:
            response.close()


async def events_of(response: Any) -> AsyncIterator[Any]:
    async for line in response.content:
        if line.strip():
            yield read_event(line)


async def collect(server: LocalServer, body: dict[str, Any], path: str = "/generate") -> list[Any]:
    reply = await server.post(path, {**body, "stream": True})
    assert reply.status == 200, reply.text
    assert reply.headers["Content-Type"].startswith("text/event-stream")
    return reply.events


async def running(server: LocalServer, count: int) -> None:
    """Wait until ``count`` requests run or wait."""
    async with asyncio.timeout(10):
        while (await server.load())["num_reqs"] != count:
            await asyncio.sleep(0.01)


LONG = greedy("A", {"max_new_tokens": 1000, "ignore_eos": True})


async def test_characters_are_never_cut(server: LocalServer) -> None:
    """C115"""
    events = await collect(server, greedy("a"))
    assert events[-1] == "[DONE]"
    texts = [event["text"] for event in events[:-1]]
    assert not any("\ufffd" in text for text in texts)
    assert texts[-1] == "é🙂!"
    assert len(texts) <= 8


async def test_stop_strings_are_never_taken_back(server: LocalServer) -> None:
    """C118, B03"""
    events = await collect(server, greedy("A", {"stop": "DAB"}))
    texts = [event["text"] for event in events[:-1]]
    assert texts[-1] == "BC"
    assert all("BC".startswith(text) for text in texts)
    assert events[-2]["meta_info"]["finish_reason"] == {"type": "stop", "matched": "DAB"}


async def test_native_text_is_cumulative(server: LocalServer) -> None:
    events = await collect(server, greedy("A", {"max_new_tokens": 6}))
    assert events[-1] == "[DONE]"
    assert [event["text"] for event in events[:-1]] == [
        "BCDABC"[: event["meta_info"]["completion_tokens"]] for event in events[:-1]
    ]
    assert events[-2]["output_ids"] == [66, 67, 68, 65, 66, 67]


async def test_incremental_events_add_up(paged_server: LocalServer) -> None:
    body = greedy("A", {"max_new_tokens": 6}, return_logprob=True, logprob_start_len=0, top_logprobs_num=2)
    events = (await collect(paged_server, body))[:-1]
    assert "".join(event["text"] for event in events) == "BCDABC"
    assert [token for event in events for token in event["output_ids"]] == [66, 67, 68, 65, 66, 67]
    scored = [entry[1] for event in events for entry in event["meta_info"]["output_token_logprobs"]]
    assert scored == [66, 67, 68, 65, 66, 67]
    assert sum(len(event["meta_info"]["output_top_logprobs"]) for event in events) == 6
    assert [entry[1] for event in events for entry in event["meta_info"]["input_token_logprobs"]] == [65]


async def test_stream_interval_makes_larger_events(server: LocalServer) -> None:
    events = await collect(server, greedy("A", {"max_new_tokens": 40, "stream_interval": 10}))
    assert len(events) <= 7
    assert events[-2]["text"] == "BCDA" * 10


async def test_batch_streams_carry_an_index(server: LocalServer) -> None:
    events = await collect(server, greedy(["A", "0", "G"], {"max_new_tokens": 4}))
    last = {event["index"]: event["text"] for event in events[:-1]}
    assert last == {0: "BCDA", 1: "1234", 2: "g"}
    finished = [event["index"] for event in events[:-1] if event["meta_info"]["finish_reason"]]
    assert sorted(finished) == [0, 1, 2]


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions"])
async def test_a_stream_ends_with_its_finish_and_one_done(server: LocalServer, path: str) -> None:
    """C402"""
    body: dict[str, Any] = {
        "/generate": greedy("G"),
        "/v1/completions": {"prompt": "G", "temperature": 0},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "G"}], "temperature": 0},
    }[path]
    if path != "/generate":
        body["stream_options"] = {"include_usage": True}
    events = await collect(server, body, path)
    assert events.count("[DONE]") == 1 and events[-1] == "[DONE]"
    if path == "/generate":
        assert events[-2]["finish_reason"] == "stop" == events[-2]["meta_info"]["finish_reason"]["type"]
        assert set(events[-2]["usage"]) == {"prompt_tokens", "completion_tokens", "cached_tokens"}
        assert events[-2]["usage"]["completion_tokens"] == 2
    else:
        assert events[-2]["usage"]["completion_tokens"] == 2
        assert events[-3]["choices"][0]["finish_reason"] == "stop"


async def seconds_to_answer(server: LocalServer, path: str) -> float:
    asked_at = time.perf_counter()
    assert (await server.get(path)).status == 200
    return time.perf_counter() - asked_at


async def test_first_event_long_before_the_last(server: LocalServer) -> None:
    """C401: while a queue of long prompts is computed beside it."""
    prompts = [{"input_ids": [70 + index] * 990, "sampling_params": {"max_new_tokens": 4}} for index in range(24)]
    started_at = time.perf_counter()
    times: list[float] = []
    async with stream(server, LONG) as response:
        queue = [asyncio.create_task(server.post("/generate", body)) for body in prompts]
        async for event in events_of(response):
            times.append(time.perf_counter() - started_at)
            if len(times) == 2:
                health = sorted([await seconds_to_answer(server, "/health") for _ in range(9)])
            if event == "[DONE]":
                break
        assert {(await task).status for task in queue} == {200}
    assert times[0] < times[-1] / 4
    assert health[4] < 0.1, health


async def read_slowly(server: LocalServer, body: dict[str, Any], chunk: int, interval: float) -> bytes:
    """A client with a small receive buffer that reads ``chunk`` bytes every ``interval`` seconds for a while."""
    loop = asyncio.get_running_loop()
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    connection.setblocking(False)
    host, port = server.url.removeprefix("http://").split(":")
    with connection:
        await loop.sock_connect(connection, (host, int(port)))
        payload = aiohttp.payload.JsonPayload({**body, "stream": True})
        data = payload._value
        head = f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\nConnection: close\r\n\r\n"
        await loop.sock_sendall(connection, head.encode() + data)
        received = bytearray()
        for _ in range(8):
            received += await loop.sock_recv(connection, chunk)
            await asyncio.sleep(interval)
        while part := await loop.sock_recv(connection, 65536):
            received += part
        return bytes(received)


async def test_slow_readers_get_everything(server: LocalServer) -> None:
    """C403: 64 readers, which are slow for a while and then read on, so that the test ends."""
    body = greedy("A", {"max_new_tokens": 900, "ignore_eos": True})
    results = await asyncio.gather(*(read_slowly(server, body, 1024, 0.25) for _ in range(64)))
    assert all(b"data: [DONE]" in result for result in results)
    expected = ("BCDA" * 225).encode()
    assert all(b'"text":"' + expected + b'"' in result for result in results)
    # Without coalescing 900 cumulative events are more than 3 MB each.
    assert max(map(len, results)) < 2_500_000


async def test_a_reader_that_stalls_loses_its_stream(chain_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The stalled stream is ended and everything it held is free; one beside it that reads slowly ends as usual."""
    options: dict[str, Any] = {"page_size": 1, "max_total_tokens": 8192, "disable_radix_cache": True}
    body = greedy("A", {"max_new_tokens": 900, "ignore_eos": True})
    async with local_server(chain_model, stream_stall_timeout=1.0, **options) as server:
        before = (await server.idle())["available_cache_pages"]
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        connection.setblocking(False)
        loop, address = asyncio.get_running_loop(), urlsplit(server.url)
        with connection:
            await loop.sock_connect(connection, (address.hostname, address.port))
            # Many choices: more than the buffers on the way hold.
            data = json.dumps({**body, "stream": True, "sampling_params": {**body["sampling_params"], "n": 4}}).encode()
            head = f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
            await loop.sock_sendall(connection, head.encode() + data)
            slow = await read_slowly(server, body, 1024, 0.25)
            assert b"data: [DONE]" in slow
            async with asyncio.timeout(10):
                await server.context.idle.wait()
            assert (await server.idle())["available_cache_pages"] == before
            received = bytearray()
            with pytest.raises(ConnectionResetError):
                while part := await loop.sock_recv(connection, 65536):
                    received += part
            assert b"[DONE]" not in received
    assert "has read nothing for 1 s" in caplog.text


@pytest.mark.parametrize("stage", ["mid-stream", "before-the-first-chunk", "unary", "several-samples"])
async def test_a_client_that_leaves_frees_its_pages(server: LocalServer, stage: str) -> None:
    """C405, B12"""
    await server.post("/flush_cache")
    before = (await server.idle())["available_cache_pages"]
    body = dict(LONG)
    if stage == "several-samples":
        body["sampling_params"] = {**LONG["sampling_params"], "n": 4}
    if stage == "unary":
        task = asyncio.create_task(server.post("/generate", body))
        await running(server, 1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    elif stage == "before-the-first-chunk":
        async with aiohttp.ClientSession() as session:
            task = asyncio.create_task(session.post(server.url + "/generate", json={**body, "stream": True}))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
    else:
        async with stream(server, body) as response:
            events = events_of(response)
            for _ in range(3):
                await anext(events)
    load = await server.idle(2.0)
    assert load["available_cache_pages"] == before
    assert server.context.requests_in_flight == 0


async def test_a_client_that_leaves_the_queue(single_server: LocalServer) -> None:
    """B12: closed while queued."""
    async with stream(single_server, LONG) as first:
        await anext(events_of(first))
        async with aiohttp.ClientSession() as session:
            task = asyncio.create_task(session.post(single_server.url + "/generate", json=greedy("G")))
            await running(single_server, 2)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await running(single_server, 1)
    await single_server.idle()


async def test_abort_of_a_running_stream(server: LocalServer) -> None:
    """C407"""
    before = (await server.idle())["available_cache_pages"]
    async with stream(server, {**LONG, "rid": "to-abort"}) as response:
        events = events_of(response)
        await anext(events)
        reply = await server.post("/abort_request", {"rid": "to-abort"})
        assert (reply.status, reply.json()["success"]) == (200, True)
        async with asyncio.timeout(2):
            rest = [event async for event in events]
    assert rest[-1] == "[DONE]"
    assert rest[-2]["meta_info"]["finish_reason"]["type"] == "abort"
    assert (await server.idle())["available_cache_pages"] == before


@pytest.mark.parametrize(
    ("body", "status", "success"),
    [
        ({"rid": "nobody"}, 200, False),
        ({"request_id": "nobody"}, 200, False),
        ({"rid": ""}, 400, None),
        ({}, 400, None),
        ({"rid": 5}, 400, None),
        ({"abort_all": "yes"}, 400, None),
    ],
)
async def test_abort_of_nothing(server: LocalServer, body: dict[str, Any], status: int, success: bool | None) -> None:
    reply = await server.post("/abort_request", body)
    assert reply.status == status
    if success is not None:
        assert reply.json()["success"] is success


async def test_abort_by_the_shown_id_and_by_prefix(server: LocalServer) -> None:
    chat = {"messages": [{"role": "user", "content": "A"}], "ignore_eos": True, "rid": "mine"}
    task = asyncio.create_task(server.post("/v1/chat/completions", chat))
    await running(server, 1)
    assert (await server.post("/abort_request", {"rid": "chatcmpl-mine"})).json()["success"]
    assert (await task).json()["choices"][0]["finish_reason"] == "abort"
    batch = asyncio.create_task(server.post("/generate", {**LONG, "text": ["A", "A"], "rid": "pair"}))
    await running(server, 2)
    assert (await server.post("/abort_request", {"rid": "pair"})).json()["success"]
    results = (await batch).json()
    assert [one["meta_info"]["finish_reason"]["type"] for one in results] == ["abort", "abort"]


async def test_abort_all(server: LocalServer) -> None:
    """C408"""
    tasks = [asyncio.create_task(server.post("/generate", LONG)) for _ in range(32)]
    await running(server, 32)
    assert (await server.post("/abort_request", {"abort_all": True})).json()["success"]
    results = [(await task).json() for task in tasks]
    assert {result["meta_info"]["finish_reason"]["type"] for result in results} == {"abort"}
    assert (await server.generate("A", sampling={"max_new_tokens": 1}))["text"] == "B"


async def test_abort_of_a_waiting_request(single_server: LocalServer) -> None:
    """C410"""
    long = greedy("A", {"max_new_tokens": 300})
    first = asyncio.create_task(single_server.post("/generate", long))
    await running(single_server, 1)
    second = asyncio.create_task(single_server.post("/generate", {**long, "rid": "waits"}))
    await running(single_server, 2)
    assert (await single_server.post("/abort_request", {"rid": "waits"})).json()["success"]
    meta = (await second).json()["meta_info"]
    assert (meta["finish_reason"]["type"], meta["completion_tokens"]) == ("abort", 0)
    assert (await first).json()["meta_info"]["completion_tokens"] == 300


async def test_waiting_too_long_is_503(single_server: LocalServer) -> None:
    """C414: a pause makes sure that the first one runs for longer than the second may wait."""
    body = greedy("A", {"max_new_tokens": 500})
    first = asyncio.create_task(single_server.post("/generate", body))
    await running(single_server, 1)
    second = asyncio.create_task(single_server.post("/generate", body))
    await running(single_server, 2)
    assert (await single_server.post("/pause_generation", {"mode": "in_place"})).status == 200
    await asyncio.sleep(1.2)
    assert (await single_server.post("/continue_generation")).status == 200
    reply = await second
    assert (reply.status, reply.json()["code"]) == (503, 503)
    assert (await first).json()["meta_info"]["completion_tokens"] == 500


async def test_full_queue_is_429(single_server: LocalServer) -> None:
    tasks = [asyncio.create_task(single_server.post("/generate", LONG)) for _ in range(6)]
    statuses = sorted([(await task).status for task in tasks])
    assert statuses.count(429) >= 1
    assert set(statuses) <= {200, 429, 503}


async def test_pause_in_place_holds_everything(server: LocalServer) -> None:
    """C416"""
    body = greedy("A", {"max_new_tokens": 300})
    tasks = [asyncio.create_task(server.post("/generate", body)) for _ in range(32)]
    await running(server, 32)
    assert (await server.post("/pause_generation", {"mode": "in_place"})).status == 200
    done = sum(task.done() for task in tasks)
    try:
        await asyncio.sleep(5.0)
        assert sum(task.done() for task in tasks) == done
        assert (await server.post("/generate", greedy("A"))).status == 412
        assert (await server.get("/ready")).status == 503
        assert (await server.get("/health")).status == 200
        assert (await server.get("/ping")).status == 200
    finally:
        assert (await server.post("/continue_generation", {})).status == 200
    texts = {(await task).json()["text"] for task in tasks}
    assert texts == {"BCDA" * 75}


@pytest.mark.parametrize("mode", ["abort", "retract"])
async def test_other_ways_to_pause(server: LocalServer, mode: str) -> None:
    task = asyncio.create_task(server.post("/generate", greedy("A", {"max_new_tokens": 400})))
    await running(server, 1)
    assert (await server.post("/pause_generation", {"mode": mode})).status == 200
    assert (await server.post("/continue_generation", {})).status == 200
    result = (await task).json()
    if mode == "abort":
        assert result["meta_info"]["finish_reason"]["type"] == "abort"
    else:
        assert result["text"] == "BCDA" * 100


async def test_pause_needs_a_known_mode(server: LocalServer) -> None:
    assert (await server.post("/pause_generation", {"mode": "later"})).status == 400
    assert (await server.call("POST", "/pause_generation")).status == 400


async def test_flush_is_refused_while_a_stream_runs(server: LocalServer) -> None:
    """C418, B20"""
    prompt = "a prompt worth keeping A"
    await server.generate(prompt, sampling={"max_new_tokens": 1})
    async with stream(server, LONG) as response:
        await anext(events_of(response))
        replies = await asyncio.gather(*(server.post("/flush_cache") for _ in range(10)))
        assert {reply.status for reply in replies} == {400}
    await server.idle()
    assert (await server.get("/flush_cache")).status == 200
    again = await server.generate(prompt, sampling={"max_new_tokens": 1})
    assert again["meta_info"]["cached_tokens"] == 0


async def test_flush_waits_for_its_timeout(server: LocalServer) -> None:
    task = asyncio.create_task(server.post("/generate", greedy("A", {"max_new_tokens": 200})))
    await running(server, 1)
    assert (await server.post("/flush_cache?timeout=20")).status == 200
    assert (await task).json()["meta_info"]["completion_tokens"] == 200
    assert (await server.post("/flush_cache?timeout=-1")).status == 400
    assert (await server.post("/flush_cache?timeout=soon")).status == 400


async def test_duplicate_id_in_flight(server: LocalServer) -> None:
    """B14"""
    async with stream(server, {**LONG, "rid": "same"}) as response:
        events = events_of(response)
        await anext(events)
        reply = await server.post("/generate", {**greedy("G"), "rid": "same"})
        assert reply.status == 400
        assert "same" in reply.text
        assert (await anext(events))["meta_info"]["finish_reason"] is None
    await server.idle()
    assert (await server.generate("G", rid="same"))["text"] == "g"
