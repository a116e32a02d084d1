"""Where the time of a request went, as clients and operators see it."""

from __future__ import annotations

import asyncio

from tests.support.server import LocalServer


async def test_a_reply_explains_itself_when_asked(server: LocalServer) -> None:
    result = await server.generate("explain me", sampling={"max_new_tokens": 5, "ignore_eos": True}, explain=True)
    told = result["meta_info"]["explain"]
    assert told["completion_tokens"] == 5
    assert told["prefill_chunks"] >= 1
    assert told["computed_tokens"] + told["cached_tokens"] == told["prompt_tokens"]
    assert told["total_seconds"] >= told["queue_seconds"] + told["prefill_seconds"]
    assert set(told["preparation_seconds"]) == {"tokenization", "grammar"}
    assert "explain" not in (await server.generate("explain me"))["meta_info"]


async def test_a_request_can_be_asked_for_afterwards(server: LocalServer) -> None:
    await server.generate("afterwards", sampling={"max_new_tokens": 3, "n": 2, "ignore_eos": True}, rid="told-later")
    reply = await server.get("/v1/requests/told-later")
    assert reply.status == 200, reply.text
    sequences = reply.json()["sequences"]
    assert [one["id"] for one in sequences] == ["told-later_0", "told-later_1"]
    assert {one["state"] for one in sequences} == {"finished"}
    assert all(one["explain"]["completion_tokens"] == 3 for one in sequences)
    unknown = await server.get("/v1/requests/nobody")
    assert unknown.status == 404
    assert "nobody" in unknown.json()["message"]


async def test_the_id_that_a_chat_reply_shows_finds_it(server: LocalServer) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "ignore_eos": True}
    reply = await server.post("/v1/chat/completions", body)
    assert reply.status == 200, reply.text
    found = await server.get(f"/v1/requests/{reply.json()['id']}")
    assert found.json()["sequences"][0]["finish_reason"] == "length"


async def test_the_wait_for_a_row_shows(single_server: LocalServer) -> None:
    first = asyncio.create_task(single_server.generate("long", sampling={"max_new_tokens": 150, "ignore_eos": True}))
    await asyncio.sleep(0)
    second = await single_server.generate("short", sampling={"max_new_tokens": 2, "ignore_eos": True}, explain=True)
    await first
    told = second["meta_info"]["explain"]
    assert told["waited_for"].keys() & {"rows", "step"}
    waited = sum(told["waited_for"].values())
    assert abs(waited - told["queue_seconds"]) < 1e-4


async def test_histograms_have_the_same(server: LocalServer) -> None:
    await server.generate("counted", sampling={"max_new_tokens": 2})
    text = (await server.get("/metrics")).text
    for name in ("queue_time_seconds", "request_prefill_seconds", "request_decode_seconds", "request_prefill_chunks"):
        line = next(line for line in text.splitlines() if line.startswith(f"sglang:{name}_count"))
        assert float(line.rsplit(" ", 1)[1]) >= 1, line
