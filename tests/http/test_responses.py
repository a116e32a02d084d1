"""The Responses API over the chain model: items, events, and responses that are stored."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio

from tests.support.named_events import named_events
from tests.support.server import LocalServer, local_server


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def storing(chain_model: Path) -> AsyncIterator[LocalServer]:
    """A server that keeps responses."""
    async with local_server(chain_model, page_size=1, max_total_tokens=8192, enable_response_store=True) as started:
        yield started


def body(given: Any = "A", **fields: Any) -> dict[str, Any]:
    return {"model": "chain", "input": given, "max_output_tokens": 4, "temperature": 0, **fields}


async def test_a_response(server: LocalServer) -> None:
    reply = (await server.post("/v1/responses", body(instructions="x"))).json()
    assert reply["id"].startswith("resp_")
    assert (reply["object"], reply["model"], reply["status"]) == ("response", "chain", "incomplete")
    assert reply["incomplete_details"] == {"reason": "max_output_tokens"}
    (item,) = reply["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "incomplete")
    assert item["content"] == [{"type": "output_text", "text": "BCDA", "annotations": [], "logprobs": []}]
    assert reply["usage"]["input_tokens"] == len("system:x|user:A")
    assert (reply["usage"]["output_tokens"], reply["store"]) == (4, False)


async def test_a_complete_response(server: LocalServer) -> None:
    reply = (await server.post("/v1/responses", body("p", max_output_tokens=20, rid="resp_mine"))).json()
    assert (reply["id"], reply["status"], reply["incomplete_details"]) == ("resp_mine", "completed", None)
    assert reply["output"][0]["content"][0]["text"] == "qXXrst"


async def test_the_prompt_of_items(server: LocalServer) -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "z"}]},
        {"type": "reasoning", "summary": []},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "5"},
        {"role": "user", "content": "A"},
    ]
    reply = (await server.post("/v1/responses", body(items))).json()
    assert reply["usage"]["input_tokens"] == len("user:x|assistant:z|tool:5|user:A")
    assert reply["output"][0]["content"][0]["text"] == "BCDA"


async def test_c607_the_events_of_a_stream(server: LocalServer) -> None:
    reply = await server.post("/v1/responses", body(stream=True))
    events = named_events(reply.body)
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    assert all(name == data["type"] for name, data in events)
    deltas = [data["delta"] for name, data in events if name == "response.output_text.delta"]
    assert [name for name, _ in events] == [
        "response.created",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * len(deltas),
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert "".join(deltas) == "BCDA"
    assert events[1][1]["item"]["content"] == []
    assert events[2][1]["part"]["text"] == ""
    final = events[-1][1]["response"]
    whole = (await server.post("/v1/responses", body())).json()
    for response in (final, whole):
        for name in ("id", "created_at"):
            response.pop(name)
        response["output"][0].pop("id")
        response["usage"].pop("input_tokens_details")
    assert final == whole


async def test_the_stream_of_a_cut_answer_says_so(server: LocalServer) -> None:
    """The client's own helper reads it to the end, and gets the response that the unstreamed call gets."""
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        cut: dict[str, Any] = {"model": "chain", "input": "A", "max_output_tokens": 4, "temperature": 0}
        async with client.responses.stream(**cut) as stream:
            final = await stream.get_final_response()
        assert (final.status, final.output_text) == ("incomplete", "BCDA")
        assert final.incomplete_details is not None
        assert final.incomplete_details.reason == "max_output_tokens"
        assert final.output[0].type == "message" and final.output[0].status == "incomplete"
        async with client.responses.stream(**{**cut, "input": "p", "max_output_tokens": 20}) as stream:
            final = await stream.get_final_response()
        assert (final.status, final.incomplete_details) == ("completed", None)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "text parts"),
        ({"input": [{"type": "web_search_call"}]}, "web_search_call"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"model": "other"}, "other"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["x"]}, "include"),
        ({"temperature": -1}, "temperature"),
        ({"text": {"format": {"type": "json_schema"}}}, "schema"),
        ({"background": True, "stream": True}, "background"),
    ],
)
async def test_bad_requests(server: LocalServer, fields: dict[str, Any], named: str) -> None:
    reply = await server.post("/v1/responses", body(given=fields.pop("input", "A"), **fields))
    assert reply.status == 400
    assert named in reply.json()["message"].lower()


async def test_without_a_store_there_is_nothing_to_look_up(server: LocalServer) -> None:
    for method, path in (("GET", "resp_1"), ("POST", "resp_1/cancel"), ("DELETE", "resp_1")):
        assert (await server.call(method, f"/v1/responses/{path}")).status == 501
    for fields in ({"previous_response_id": "resp_1"}, {"background": True}):
        reply = await server.post("/v1/responses", body(**fields))
        assert reply.status == 400
        assert "--enable-response-store" in reply.json()["message"]


async def test_stored_responses(storing: LocalServer) -> None:
    first = (await storing.post("/v1/responses", body("x"))).json()
    assert (await storing.get(f"/v1/responses/{first['id']}")).json() == first
    second = (await storing.post("/v1/responses", body("A", previous_response_id=first["id"], stream=True))).body
    response = named_events(second)[-1][1]["response"]
    text = first["output"][0]["content"][0]["text"]
    assert response["usage"]["input_tokens"] == len(f"user:x|assistant:{text}|user:A".encode())
    assert (await storing.get(f"/v1/responses/{response['id']}")).json() == response
    assert (await storing.post(f"/v1/responses/{first['id']}/cancel")).status == 400
    assert (await storing.call("DELETE", f"/v1/responses/{first['id']}")).json()["deleted"] is True
    assert (await storing.get(f"/v1/responses/{first['id']}")).status == 404
    unstored = (await storing.post("/v1/responses", body(store=False))).json()
    assert (await storing.get(f"/v1/responses/{unstored['id']}")).status == 404


async def test_background_responses(storing: LocalServer) -> None:
    begun = (await storing.post("/v1/responses", body(background=True))).json()
    assert (begun["status"], begun["output"]) == ("in_progress", [])
    while (found := (await storing.get(f"/v1/responses/{begun['id']}")).json())["status"] == "in_progress":
        await asyncio.sleep(0.01)
    assert (found["status"], found["output"][0]["content"][0]["text"]) == ("incomplete", "BCDA")


async def test_cancelled_background_responses_free_everything(storing: LocalServer) -> None:
    begun = (await storing.post("/v1/responses", body(background=True, max_output_tokens=900))).json()
    ended = (await storing.post(f"/v1/responses/{begun['id']}/cancel")).json()
    assert ended["status"] == "cancelled"
    assert (await storing.get(f"/v1/responses/{begun['id']}")).json()["status"] == "cancelled"
    await storing.idle(1.0)


async def test_openai_sdk_responses(server: LocalServer) -> None:
    request: dict[str, Any] = {"model": "chain", "input": "A", "max_output_tokens": 4, "temperature": 0}
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        reply = await client.responses.create(**request)
        assert reply.output_text == "BCDA"
        events = [event async for event in await client.responses.create(**request, stream=True)]
    assert events[-1].type == "response.completed"
    assert events[-1].response.output_text == "BCDA"
