"""Tool calls and reasoning as Anthropic's blocks and as response items: what the chat API calls by other names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from sglang_lite.frontend.request import FinishReason, GenerateRequest, GenerationOutput
from tests.support.named_events import named_events
from tests.support.server import LocalServer

ANSWER = '<think>hm</think>Let me see.<tool_call>{"name": "f", "arguments": {"city": "Paris"}}</tool_call>'
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
MESSAGES = {
    "model": "chain",
    "max_tokens": 99,
    "messages": [{"role": "user", "content": "A"}],
    "tools": [{"name": "f", "input_schema": SCHEMA}],
}
RESPONSES = {
    "model": "chain",
    "input": "A",
    "tools": [{"type": "function", "name": "f", "parameters": SCHEMA}],
}


@pytest.fixture
def scripted(server: LocalServer, monkeypatch: pytest.MonkeyPatch) -> LocalServer:
    """The server, whose model answers ``ANSWER`` and whose parsers are those of Qwen."""

    async def answer(request: GenerateRequest) -> Any:
        steps = range(1, len(ANSWER) + 1) if request.stream else (len(ANSWER),)
        for count in steps:
            end = FinishReason("stop", matched=258) if count == len(ANSWER) else None
            yield GenerationOutput(
                request_id=request.request_id,
                text=ANSWER[:count],
                output_ids=[65] * count,
                finish_reason=end,
                prompt_tokens=3,
                completion_tokens=count,
                cached_tokens=0,
            )

    monkeypatch.setattr(server.engine, "generate", answer)
    parsers = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
    monkeypatch.setattr(server.context, "config", server.context.config.model_copy(update=parsers))
    return server


def text_of(events: list[tuple[str, Any]], name: str, key: str) -> Iterator[str]:
    return (data["delta"][key] for kind, data in events if kind == name and key in data["delta"])


async def test_a_message_with_tool_use(scripted: LocalServer) -> None:
    reply = (await scripted.post("/v1/messages", MESSAGES)).json()
    thinking, text, call = reply["content"]
    assert thinking == {"type": "thinking", "thinking": "hm", "signature": ""}
    assert (text["type"], text["text"].strip()) == ("text", "Let me see.")
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "f", {"city": "Paris"})
    assert (reply["stop_reason"], call["id"].startswith("call_")) == ("tool_use", True)


async def test_a_streamed_message_with_tool_use(scripted: LocalServer) -> None:
    events = named_events((await scripted.post("/v1/messages", {**MESSAGES, "stream": True})).body)
    starts = [data for name, data in events if name == "content_block_start"]
    assert [(data["index"], data["content_block"]["type"]) for data in starts] == [
        (0, "thinking"),
        (1, "text"),
        (2, "tool_use"),
    ]
    assert [data["index"] for name, data in events if name == "content_block_stop"] == [0, 1, 2]
    assert "".join(text_of(events, "content_block_delta", "thinking")) == "hm"
    assert "".join(text_of(events, "content_block_delta", "text")).strip() == "Let me see."
    assert "".join(text_of(events, "content_block_delta", "partial_json")) == '{"city": "Paris"}'
    assert events[-2][1]["delta"]["stop_reason"] == "tool_use"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_with_a_call(scripted: LocalServer, stream: bool) -> None:
    reply = await scripted.post("/v1/responses", {**RESPONSES, "stream": stream})
    response = named_events(reply.body)[-1][1]["response"] if stream else reply.json()
    reasoning, message, call = response["output"]
    assert (reasoning["type"], reasoning["content"][0]["text"]) == ("reasoning", "hm")
    assert message["content"][0]["text"].strip() == "Let me see."
    assert (call["type"], call["name"], call["arguments"]) == ("function_call", "f", '{"city": "Paris"}')
    assert (response["status"], {item["status"] for item in response["output"]}) == ("completed", {"completed"})
    if stream:
        events = named_events(reply.body)
        assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
        arguments = [data["delta"] for name, data in events if name == "response.function_call_arguments.delta"]
        assert "".join(arguments) == call["arguments"]
