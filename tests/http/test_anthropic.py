"""Anthropic's messages over the chain model: blocks, events, errors, and the vendor's own client."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest

from tests.support.named_events import named_events
from tests.support.server import LocalServer


def body(text: Any = "A", **fields: Any) -> dict[str, Any]:
    """A request whose prompt ends with ``text``."""
    return {
        "model": "chain",
        "max_tokens": 4,
        "temperature": 0,
        "messages": [{"role": "user", "content": text}],
        **fields,
    }


async def test_a_message(server: LocalServer) -> None:
    reply = (await server.post("/v1/messages", body())).json()
    assert reply.pop("id").startswith("msg_")
    assert reply == {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "text", "text": "BCDA"}],
        "model": "chain",
        "stop_reason": "max_tokens",
        "stop_sequence": None,
        "usage": {"input_tokens": len("user:A"), "output_tokens": 4},
    }


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"stop_sequences": ["D"], "max_tokens": 9}, "BC"),
        ({"messages": [{"role": "user", "content": "p"}], "max_tokens": 9}, "qXXrst"),
    ],
)
async def test_any_stop_ends_the_turn(server: LocalServer, fields: dict[str, Any], text: str) -> None:
    reply = (await server.post("/v1/messages", body(**fields))).json()
    assert (reply["content"][0]["text"], reply["stop_reason"], reply["stop_sequence"]) == (text, "end_turn", None)


async def test_the_prompt_of_a_conversation(server: LocalServer) -> None:
    request = body(
        system=[{"type": "text", "text": "be brief"}],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "z"}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "5"}]},
            {"role": "user", "content": "A"},
        ],
    )
    prompt = "system:be brief|user:x y|assistant:z|tool:5|user:A"
    reply = (await server.post("/v1/messages", request)).json()
    assert (reply["content"][0]["text"], reply["usage"]["input_tokens"]) == ("BCDA", len(prompt))
    count = await server.post(
        "/v1/messages/count_tokens", {key: request[key] for key in ("model", "messages", "system")}
    )
    assert count.json() == {"input_tokens": len(prompt)}


async def test_the_events_of_a_stream(server: LocalServer) -> None:
    reply = await server.post("/v1/messages", body(stream=True))
    assert reply.headers["Content-Type"].startswith("text/event-stream")
    events = named_events(reply.body)
    names = [name for name, _ in events]
    assert all(name == data["type"] for name, data in events)
    deltas = [data for name, data in events if name == "content_block_delta"]
    assert names == [
        "message_start",
        "content_block_start",
        *["content_block_delta"] * len(deltas),
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert events[0][1]["message"]["usage"] == {"input_tokens": 6, "output_tokens": 0}
    assert events[1][1] == {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
    assert "".join(delta["delta"]["text"] for delta in deltas) == "BCDA"
    assert {delta["index"] for delta in deltas} == {0}
    assert events[-2][1]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert events[-2][1]["usage"]["output_tokens"] == 4


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 5000}, "maximum context length"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "nobody", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "text blocks"),
        ({"model": "other"}, "other"),
        ({"thinking": {"type": "enabled"}}, "budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 5}}, "budget_tokens"),
        ({"temperature": "warm"}, "temperature"),
        ({"top_p": 7}, "top_p"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice"),
    ],
)
async def test_errors_have_the_envelope(server: LocalServer, fields: dict[str, Any], named: str, stream: bool) -> None:
    reply = await server.post("/v1/messages", body(stream=stream, **fields) if fields else {})
    assert reply.status == 400
    assert (reply.json()["type"], reply.json()["error"]["type"]) == ("error", "invalid_request_error")
    assert named in reply.json()["error"]["message"]


async def test_unknown_methods_have_the_envelope(server: LocalServer) -> None:
    reply = await server.get("/v1/messages")
    assert (reply.status, reply.json()["type"]) == (405, "error")


async def test_anthropic_sdk(server: LocalServer) -> None:
    async with anthropic.AsyncAnthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        request: dict[str, Any] = {
            "model": "chain",
            "max_tokens": 4,
            "messages": [{"role": "user", "content": "A"}],
            "extra_body": {"temperature": 0},
        }
        message = await client.messages.create(**request)
        assert message.content[0].text == "BCDA"
        async with client.messages.stream(**request) as stream:
            pieces = [text async for text in stream.text_stream]
            final = await stream.get_final_message()
        assert "".join(pieces) == "BCDA"
        assert (final.stop_reason, final.usage.output_tokens) == ("max_tokens", 4)
        counted = await client.messages.count_tokens(model="chain", messages=request["messages"])
        assert counted.input_tokens == 6
        with pytest.raises(anthropic.BadRequestError):
            await client.messages.create(**{**request, "max_tokens": 0})
