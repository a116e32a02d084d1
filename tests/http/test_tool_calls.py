"""Tool calls and reasoning over the whole engine, and through OpenAI's client."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio

from tests.support.call_texts import SCHEMAS, tools
from tests.support.server import LocalServer, local_server

CHAT = "/v1/chat/completions"
THINKING = "{{ messages[-1].content }}{% if enable_thinking is not defined or enable_thinking %}<think>A{% endif %}"


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def calling(chain_model: Path) -> AsyncIterator[LocalServer]:
    """Parsers for Qwen's texts; the template opens the reasoning."""
    async with local_server(
        chain_model,
        page_size=1,
        max_total_tokens=4096,
        tool_call_parser="qwen",
        reasoning_parser="qwen3-thinking",
        chat_template=THINKING,
    ) as started:
        yield started


def body(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "A"}], "temperature": 0, "max_tokens": 6, **fields}


@pytest.mark.parametrize("stream", [False, True])
async def test_reasoning_cut_by_the_limit(calling: LocalServer, stream: bool) -> None:
    """B16"""
    reply = await calling.post(CHAT, body(stream=stream))
    if stream:
        deltas = [event["choices"][0]["delta"] for event in reply.events[:-1]]
        assert "".join(delta["reasoning_content"] or "" for delta in deltas) == "BCDABC"
        assert "".join(delta.get("content") or "" for delta in deltas) == ""
        assert reply.events[-2]["choices"][0]["finish_reason"] == "length"
        return
    choice, usage = reply.json()["choices"][0], reply.json()["usage"]
    assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == ("BCDABC", "")
    assert choice["finish_reason"] == "length"
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 6}


async def test_no_reasoning_when_it_is_turned_off(calling: LocalServer) -> None:
    fields = {"chat_template_kwargs": {"enable_thinking": False}}
    message = (await calling.post(CHAT, body(**fields))).json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == (None, "BCDABC")


@pytest.mark.parametrize(
    ("choice", "names"),
    [("required", set(SCHEMAS)), ({"type": "function", "function": {"name": "g"}}, {"g"})],
    ids=["required", "named"],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_forced_calls(calling: LocalServer, choice: Any, names: set[str], stream: bool) -> None:
    fields = {"tools": tools(), "tool_choice": choice, "parallel_tool_calls": False, "max_tokens": 400}
    # The function without parameters is the shortest call of a model that has no idea what it is doing.
    fields["tools"][0]["function"]["parameters"] = {"type": "object", "properties": {}, "additionalProperties": False}
    fields["tools"][1]["function"]["parameters"] = {"type": "object", "properties": {}, "additionalProperties": False}
    reply = await calling.post(CHAT, body(stream=stream, **fields))
    assert reply.status == 200, reply.text
    if stream:
        parts = [call for event in reply.events[:-1] for call in event["choices"][0]["delta"].get("tool_calls", ())]
        name, arguments = parts[0]["function"]["name"], "".join(part["function"]["arguments"] for part in parts)
        finish = reply.events[-2]["choices"][0]["finish_reason"]
    else:
        answer = reply.json()["choices"][0]
        [call] = answer["message"]["tool_calls"]
        name, arguments, finish = call["function"]["name"], call["function"]["arguments"], answer["finish_reason"]
    assert name in names
    assert json.loads(arguments) == {}
    assert finish == "tool_calls"


async def test_forced_arguments_waste_nothing_on_whitespace(calling: LocalServer, chain_model: Path) -> None:
    """A model that draws at random ends the call, because no place has room for a run of whitespace."""
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    declared = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    fields = {"tools": declared, "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 90}
    async with local_server(chain_model, page_size=1, max_total_tokens=4096, grammar_backend="llguidance") as other:
        for server in (calling, other):
            # The chain model never wants whitespace; the bias makes it want nothing else.
            bias = {str(token): 50 for token in b" \n\r\t"}
            reply = await server.post(CHAT, body(**{**fields, "logit_bias": bias}))
            [call] = reply.json()["choices"][0]["message"]["tool_calls"]
            assert json.loads(call["function"]["arguments"])["n"] in (1, 2)
            assert reply.json()["choices"][0]["finish_reason"] == "tool_calls"


async def test_a_strict_schema_that_cannot_be_enforced(calling: LocalServer) -> None:
    declared = [{"type": "function", "function": {"name": "f", "parameters": {"not": {}}, "strict": True}}]
    reply = await calling.post(CHAT, body(tools=declared))
    assert (reply.status, reply.json()["param"]) == (400, "tools")
    assert "tools/0/function/parameters" in reply.json()["message"]
    for path, other in (
        ("/v1/messages", {"tools": [{"name": "f", "input_schema": {"not": {}}, "strict": True}], "max_tokens": 6}),
        ("/v1/responses", {"tools": [{"type": "function", **declared[0]["function"]}], "input": "A"}),
    ):
        fields = {"model": "chain", **({"messages": body()["messages"]} if path == "/v1/messages" else {}), **other}
        reply = await calling.post(path, fields)
        assert (reply.status, "tools/0/function/parameters" in reply.text) == (400, True), reply.text
    declared[0]["function"]["parameters"] = {"type": "object", "properties": {}}
    reply = await calling.post(CHAT, body(tools=declared))
    assert reply.json()["choices"][0]["message"]["reasoning_content"] == "BCDABC"


async def test_a_forced_call_without_a_grammar_backend(chain_model: Path) -> None:
    async with local_server(chain_model, page_size=1, max_total_tokens=256, grammar_backend="none") as server:
        reply = await server.post(CHAT, body(tools=tools(), tool_choice="required"))
        assert reply.status == 400
        assert "grammar" in reply.json()["message"]


async def test_official_client(calling: LocalServer) -> None:
    async with openai.AsyncOpenAI(base_url=f"{calling.url}/v1", api_key="none") as client:
        empty: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
        declared: Any = [{"type": "function", "function": {"name": "g", "parameters": empty}}]
        messages: list[Any] = [{"role": "user", "content": "A"}]
        answer = await client.chat.completions.create(
            model="chain", messages=messages, tools=declared, tool_choice="required", temperature=0, max_tokens=400,
            parallel_tool_calls=False,
        )  # fmt: skip
        [call] = answer.choices[0].message.tool_calls or []
        assert call.type == "function" and call.function.name == "g" and json.loads(call.function.arguments) == {}
        reply = {"role": "tool", "tool_call_id": call.id, "content": "A"}
        again = await client.chat.completions.create(
            model="chain",
            messages=[*messages, answer.choices[0].message, reply],
            tools=declared,
            max_tokens=2,
            temperature=0,
        )
        assert again.choices[0].finish_reason == "length"
        stream = await client.chat.completions.create(
            model="chain", messages=messages, tools=declared, tool_choice="required", temperature=0, max_tokens=400,
            parallel_tool_calls=False, stream=True,
        )  # fmt: skip
        parts = [part async for chunk in stream for part in chunk.choices[0].delta.tool_calls or ()]
        assert parts[0].id and parts[0].function and parts[0].function.name == "g"
        text = "".join((part.function and part.function.arguments) or "" for part in parts)
        assert json.loads(text) == {}
