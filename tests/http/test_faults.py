"""Faults of a request's life seen in this field (B11 to B14, B17, B20), against a real engine."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.support.server import LocalServer, greedy, local_server, read_event

LONG = greedy("A", {"max_new_tokens": 1000, "ignore_eos": True})


async def busy(server: LocalServer, at_least: int = 1) -> None:
    """Wait until that many requests run or wait."""
    async with asyncio.timeout(10):
        while (await server.load())["num_reqs"] < at_least:
            await asyncio.sleep(0.005)


async def free_pages(server: LocalServer) -> int:
    """Pages that are free or cached, once nothing runs; a client that left must be gone within a second."""
    load = await server.idle(1.0)
    assert server.context.requests_in_flight == 0
    assert len(server.engine._flow.processor) == 0
    pages: int = load["available_cache_pages"]
    return pages


async def leave_after(server: LocalServer, body: dict[str, Any], events: int) -> None:
    """Open a stream, read that many events and close the connection."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session:
        response = await session.post(server.url + "/generate", json={**body, "stream": True})
        for _ in range(events):
            await response.content.readuntil(b"\n\n")
        response.close()


async def leave_before_the_answer(server: LocalServer, body: dict[str, Any], *, stream: bool) -> None:
    """Send a request, wait until the engine has it and close the connection."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session:
        task = asyncio.create_task(session.post(server.url + "/generate", json={**body, "stream": stream}))
        await busy(server)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_b12_eight_clients_leave_in_the_middle(server: LocalServer) -> None:
    """B12"""
    await server.post("/flush_cache")
    before = await free_pages(server)
    bodies = [{**LONG, "rid": f"leaves-{index}"} for index in range(8)]
    await asyncio.gather(*(leave_after(server, body, 3) for body in bodies))
    assert await free_pages(server) == before
    for body in bodies:
        reply = await server.post("/abort_request", {"rid": body["rid"]})
        assert (reply.status, reply.json()["success"]) == (200, False)


@pytest.mark.parametrize("choices", [1, 4])
@pytest.mark.parametrize("stream", [False, True])
async def test_b12_clients_leave_before_anything_was_sent(
    tight_server: LocalServer, stream: bool, choices: int
) -> None:
    """B12: a prompt of 48 tokens takes six steps here, most of them before the first token."""
    before = await free_pages(tight_server)
    ids = [66] * 47 + [65]
    body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 8, "ignore_eos": True, "n": choices}}
    for _ in range(3):
        await leave_before_the_answer(tight_server, body, stream=stream)
    assert await free_pages(tight_server) == before


async def test_b12_a_client_leaves_the_queue(single_server: LocalServer) -> None:
    """B12"""
    before = await free_pages(single_server)
    first = asyncio.create_task(single_server.post("/generate", {**LONG, "rid": "first"}))
    await busy(single_server)
    async with aiohttp.ClientSession() as session:
        task = asyncio.create_task(session.post(single_server.url + "/generate", json=greedy("G")))
        await busy(single_server, 2)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    async with asyncio.timeout(1):
        while (await single_server.load())["num_reqs"] > 1:
            await asyncio.sleep(0.005)
    await single_server.post("/abort_request", {"rid": "first"})
    await first
    assert await free_pages(single_server) == before


@pytest.mark.parametrize("chunks", [1, 3, 6])
async def test_b13_abort_during_chunked_prefill(tight_server: LocalServer, chunks: int) -> None:
    """B13: whatever step the abort meets, no token follows it and the neighbour is untouched."""
    before = await free_pages(tight_server)
    neighbour = asyncio.create_task(tight_server.post("/generate", greedy("A", {"max_new_tokens": 12})))
    ids = [66] * (8 * chunks - 1) + [65]
    sampling = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
    body = {"input_ids": ids, "sampling_params": sampling, "rid": "cut"}
    task = asyncio.create_task(tight_server.post("/generate", body))
    while not (await tight_server.post("/abort_request", {"rid": "cut"})).json()["success"] and not task.done():
        pass
    meta = (await task).json()["meta_info"]
    if meta["finish_reason"]["type"] == "abort":
        assert all(token in (65, 66, 67, 68) for token in (await task).json()["output_ids"])
        assert meta["completion_tokens"] == len((await task).json()["output_ids"])
    assert (await neighbour).json()["text"] == "BCDA" * 3
    assert await free_pages(tight_server) == before


async def test_b13_abort_all_in_the_middle(server: LocalServer) -> None:
    """B13"""
    tasks = [asyncio.create_task(server.post("/generate", {**LONG, "rid": f"all-{i}"})) for i in range(12)]
    await busy(server, 12)
    assert (await server.post("/abort_request", {"abort_all": True})).json()["success"]
    for task in tasks:
        result = (await task).json()
        assert result["meta_info"]["finish_reason"]["type"] == "abort"
        assert result["text"] == ("BCDA" * 250)[: len(result["text"])]
        assert len(result["output_ids"]) == result["meta_info"]["completion_tokens"]
    await free_pages(server)


async def test_b14_ids(server: LocalServer) -> None:
    """B14"""
    first = asyncio.create_task(server.post("/generate", {**LONG, "rid": "same"}))
    await busy(server)
    second = await server.post("/generate", {**greedy("G"), "rid": "same"})
    assert (second.status, "Duplicate request ID detected: same" in second.text) == (400, True)
    streamed = await server.post("/generate", {**greedy("G"), "rid": "same", "stream": True})
    assert streamed.status == 400
    await server.post("/abort_request", {"rid": "same"})
    assert (await first).json()["meta_info"]["id"] == "same"
    assert (await server.generate("G", rid="same"))["text"] == "g"
    twice = await server.post("/generate", {**greedy(["G", "G"]), "rid": ["x", "x"]})
    assert (twice.status, "Duplicate request IDs" in twice.text) == (400, True)
    for wrong in ("", "a\nb", "x" * 2**20):
        assert (await server.post("/generate", {**greedy("G"), "rid": wrong})).status == 400
    chat = {"messages": [{"role": "user", "content": "G"}], "temperature": 0}
    headers = {"X-Request-Id": "mine", "traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"}
    replies = await asyncio.gather(
        *(server.post("/v1/chat/completions", chat, headers=headers) for _ in range(2)),
    )
    assert [reply.status for reply in replies] == [200, 200]


async def test_b14_a_duplicate_of_one_item_leaves_nothing_of_the_batch(server: LocalServer) -> None:
    """B14"""
    first = asyncio.create_task(server.post("/generate", {**LONG, "rid": "pair_1"}))
    await busy(server)
    refused = await server.post("/generate", {**LONG, "text": ["A", "A", "A"], "rid": "pair"})
    assert refused.status == 400
    async with asyncio.timeout(1):
        while (await server.load())["num_reqs"] != 1:
            await asyncio.sleep(0.005)
    await server.post("/abort_request", {"rid": "pair_1"})
    assert (await first).json()["meta_info"]["finish_reason"]["type"] == "abort"
    await free_pages(server)


async def test_b11_one_empty_item_of_a_batch(server: LocalServer) -> None:
    """B11"""
    before = await free_pages(server)
    for body in ({"input_ids": [[65], []]}, {"text": ["A", ""]}, {"input_ids": [[65], [300]]}):
        reply = await server.post("/generate", {**body, "sampling_params": {"max_new_tokens": 500}})
        assert reply.status == 400, reply.text
    assert await free_pages(server) == before


async def test_b17_one_item_of_a_batch_is_too_long(server: LocalServer) -> None:
    """B17: nothing of the batch is left."""
    before = await free_pages(server)
    for stream in (False, True):
        body = {"input_ids": [[65], [66] * 1024], "sampling_params": {"max_new_tokens": 500}, "stream": stream}
        reply = await server.post("/generate", body)
        assert reply.status == 400
        assert "1024" in reply.text
    assert await free_pages(server) == before


async def test_b20_flushes_beside_streams(server: LocalServer) -> None:
    """B20"""
    prompt = "a prompt that is worth keeping A"
    await server.generate(prompt, sampling={"max_new_tokens": 1})
    tasks = [asyncio.create_task(server.post("/generate", greedy("A", {"max_new_tokens": 200}))) for _ in range(20)]
    await busy(server, 20)
    replies = await asyncio.gather(*(server.post("/flush_cache") for _ in range(50)))
    assert {reply.status for reply in replies} == {400}
    assert all("running or waiting" in reply.text for reply in replies)
    patient = asyncio.create_task(server.post("/flush_cache?timeout=30"))
    assert {(await task).json()["text"] for task in tasks} == {"BCDA" * 50}
    assert (await patient).status == 200
    load = await server.idle()
    assert load["num_used_tokens"] == 0
    again = await server.generate(prompt, sampling={"max_new_tokens": 1})
    assert again["meta_info"]["cached_tokens"] == 0


async def test_b20_a_flush_right_after_the_last_stream(server: LocalServer) -> None:
    """B20: a client that has seen its stream end may flush."""
    for count in range(1, 8):
        await server.generate("A", sampling={"max_new_tokens": count})
        assert (await server.post("/flush_cache")).status == 200


async def test_b20_flushes_while_the_last_stream_ends(server: LocalServer) -> None:
    """B20: whichever of them is the first behind it, a flush that says so has emptied the cache."""
    ids = list(b"a prompt that is worth keeping A")
    for count in range(1, 5):
        task = asyncio.create_task(server.generate(input_ids=ids, sampling={"max_new_tokens": 30 * count}))
        await busy(server)
        statuses = []
        while not task.done() or 200 not in statuses:
            statuses += [
                reply.status for reply in await asyncio.gather(*(server.post("/flush_cache") for _ in range(5)))
            ]
        assert set(statuses) == {200, 400}, statuses
        assert (await task)["text"] == ("BCDA" * 30)[: 30 * count]
        load = await server.idle()
        assert load["num_used_tokens"] == 0
        again = await server.generate(input_ids=ids, sampling={"max_new_tokens": 1})
        assert again["meta_info"]["cached_tokens"] == 0


async def test_b20_with_one_of_two_replicas_busy(chain_model: Path) -> None:
    """B20: success only when every replica was flushed."""
    async with local_server(chain_model, page_size=1, max_total_tokens=2048, dp_size=2) as server:
        ids = list(b"a prompt that is worth keeping A")
        for rank in (0, 1):
            body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 1}, "routed_dp_rank": rank}
            assert (await server.post("/generate", body)).status == 200
        task = asyncio.create_task(server.post("/generate", {**LONG, "routed_dp_rank": 1, "rid": "holds"}))
        await asyncio.sleep(0)
        while sum(load["num_reqs"] for load in (await server.get("/v1/loads")).json()["loads"]) == 0:
            await asyncio.sleep(0.005)
        assert (await server.post("/flush_cache")).status == 400
        await server.post("/abort_request", {"rid": "holds"})
        await task
        assert (await server.post("/flush_cache?timeout=5")).status == 200
        for rank in (0, 1):
            body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 1}, "routed_dp_rank": rank}
            assert (await server.post("/generate", body)).json()["meta_info"]["cached_tokens"] == 0


async def test_a_reader_that_stops_holds_up_nobody(server: LocalServer) -> None:
    """C403: the others finish; when the stopped one reads on, its stream is whole."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True), read_bufsize=2048) as session:
        body = {**greedy("A", {"max_new_tokens": 900, "ignore_eos": True}), "stream": True}
        response = await session.post(server.url + "/generate", json=body)
        await response.content.readuntil(b"\n\n")
        others = await asyncio.gather(
            *(server.post("/generate", greedy("A", {"max_new_tokens": 300})) for _ in range(8))
        )
        assert {other.json()["text"] for other in others} == {"BCDA" * 75}
        rest = await response.read()
    events = [read_event(block) for block in rest.split(b"\n\n") if block.startswith(b"data: ")]
    assert events[-1] == "[DONE]"
    assert events[-2]["text"] == "BCDA" * 225


async def test_queue_time_is_told(single_server: LocalServer, server: LocalServer) -> None:
    """``queue_time`` with metrics on, and none without."""
    meta = (await server.generate("G"))["meta_info"]
    assert 0 <= meta["queue_time"] < 5
    assert meta["request_received_ts"] <= meta["forward_entry_time"] <= meta["request_finished_ts"]
    assert "queue_time" not in (await single_server.generate("G"))["meta_info"]
    text = (await server.get("/metrics")).text
    counts = [line for line in text.splitlines() if line.startswith("sglang:queue_time_seconds_count")]
    assert counts and float(counts[0].split()[-1]) >= 1


@pytest.mark.parametrize("stream", [False, True])
async def test_b10_a_bad_neighbour_changes_nothing(server: LocalServer, stream: bool) -> None:
    """B10"""
    task = asyncio.create_task(server.post("/generate", greedy("A", {"max_new_tokens": 300})))
    await busy(server)
    bad: list[dict[str, Any]] = [
        *({"input_ids": ids} for ids in ([-1], [2**31], [260], [1.5], [True])),
        *({"text": "A", "sampling_params": {"logit_bias": bias}} for bias in ({"-1": 5}, {"999999": 5}, {"abc": 1})),
        {"text": "A", "sampling_params": {"logit_bias": {"1": 1e9}}},
        {"text": "A", "sampling_params": {"stop_token_ids": [10**9]}},
        {"text": "A", "return_logprob": True, "token_ids_logprob": [-3]},
    ]
    for body, _ in itertools.product(bad, range(2)):
        reply = await server.post("/generate", {**body, "stream": stream})
        assert reply.status == 400
    assert (await task).json()["text"] == "BCDA" * 75
