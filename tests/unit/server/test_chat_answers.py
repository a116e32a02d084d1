"""Chat completions with tool calls and reasoning over a scripted engine: whole and streamed alike."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

from sglang_lite.frontend.request import FinishReason, GenerateRequest, GenerationOutput
from sglang_lite.server.app import make_app
from sglang_lite.server.context import Phase, ServerContext
from tests.support.call_texts import WRITERS, tools, write_calls
from tests.support.fake_engine import FakeEngine, snapshot
from tests.support.server import read_event

CHAT = "/v1/chat/completions"
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("f", {"text": "é <|call|>", "count": 2}),
    ("g", {}),
    ("f", {"data": {"a": [1]}}),
]
STOP, LENGTH = FinishReason("stop", matched=258), FinishReason("length", length=9)
HARMONY = "<|channel|>analysis<|message|>ab<|end|><|start|>assistant<|channel|>final<|message|>cd"
TEMPLATE = "{{ messages[-1].content }}{% if enable_thinking is not defined or enable_thinking %}<think>\n{% endif %}"


class Letters:
    """A tokenizer in which every character is a token."""

    def __init__(self, template: str) -> None:
        self.chat_templates = {"default": template}
        self.named_tokens: dict[str, str] = {}
        self.special_ids: frozenset[int] = frozenset()

    def token_to_id(self, token: str) -> int | None:
        return None

    def detokenizer(self, *, skip_special_tokens: bool) -> Any:
        return SimpleNamespace(push=chr)


def saying(text: str, finish: FinishReason = STOP, size: int = 1) -> FakeEngine:
    """An engine that answers ``text`` in pieces of ``size`` characters."""

    def script(request: GenerateRequest) -> list[GenerationOutput | Exception]:
        requests.append(request)
        cuts = range(size, len(text), size) if request.stream else ()
        return [*(snapshot(request, text[:end]) for end in cuts), snapshot(request, text, finish)]

    requests: list[GenerateRequest] = []
    engine = FakeEngine(script)
    engine.requests = requests  # type: ignore[attr-defined]
    return engine


@asynccontextmanager
async def serving(
    engine: FakeEngine, template: str = "{{ messages[-1].content }}", **options: Any
) -> AsyncIterator[TestClient[Any, Any]]:
    engine.config = engine.config.model_copy(update=options)
    engine.tokenizer = Letters(template)
    context = ServerContext(engine)
    context.phase = Phase.READY
    async with TestClient(TestServer(make_app(context))) as client:
        yield client


def body(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "q"}], **fields}


async def ask(client: TestClient[Any, Any], **fields: Any) -> Any:
    response = await client.post(CHAT, json=body(**fields))
    assert response.status == 200, await response.text()
    return await response.json()


async def streamed(client: TestClient[Any, Any], **fields: Any) -> dict[str, Any]:
    """The choice that the chunks of a stream add up to, and its usage."""
    response = await client.post(CHAT, json=body(stream=True, stream_options={"include_usage": True}, **fields))
    events = [read_event(block) for block in (await response.read()).split(b"\n\n") if block]
    assert events.pop() == "[DONE]"
    usage = events.pop()["usage"]
    message: dict[str, Any] = {"content": "", "reasoning_content": None}
    calls: list[dict[str, Any]] = []
    finish: list[tuple[Any, Any]] = []
    for event in events:
        [choice] = event["choices"]
        delta = choice["delta"]
        assert "reasoning_content" in delta and not finish
        message["content"] += delta.get("content") or ""
        if delta["reasoning_content"]:
            message["reasoning_content"] = (message["reasoning_content"] or "") + delta["reasoning_content"]
        for call in delta.get("tool_calls", ()):
            if call["id"] is not None:
                assert call["index"] == len(calls) and call["function"]["arguments"] == ""
                calls.append({"id": call["id"], "name": call["function"]["name"], "arguments": ""})
            else:
                assert call["function"]["name"] is None
                calls[call["index"]]["arguments"] += call["function"]["arguments"]
        if choice["finish_reason"]:
            finish.append((choice["finish_reason"], choice["matched_stop"]))
    return {"message": message, "calls": calls, "finish": finish[0], "usage": usage}


def made(calls: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    functions = [call.get("function", call) for call in calls]
    return [(function["name"], json.loads(function["arguments"])) for function in functions]


@pytest.mark.parametrize("name", sorted(WRITERS))
async def test_calls(name: str) -> None:
    """B15"""
    async with serving(saying(write_calls(name, CALLS)), tool_call_parser=name) as client:
        [choice] = (await ask(client, tools=tools()))["choices"]
        stream = await streamed(client, tools=tools())
    calls = choice["message"]["tool_calls"]
    assert made(calls) == CALLS == made(stream["calls"])
    assert (choice["finish_reason"], choice["matched_stop"]) == ("tool_calls", None) == stream["finish"]
    assert choice["message"]["content"] == "" == stream["message"]["content"]
    for ids in ([call["id"] for call in calls], [call["id"] for call in stream["calls"]]):
        if name == "kimi_k2":
            assert ids == ["functions.f:0", "functions.g:1", "functions.f:2"]
        else:
            assert len(set(ids)) == 3 and all(re.fullmatch("call_[0-9a-f]{24}", one) for one in ids)


async def test_numbers_of_calls_go_on_from_the_conversation() -> None:
    history = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "content": "r"},
    ]
    async with serving(saying(write_calls("kimi_k2", CALLS[:1])), tool_call_parser="kimi_k2") as client:
        [choice] = (await ask(client, messages=history, tools=tools()))["choices"]
    assert choice["message"]["tool_calls"][0]["id"] == "functions.f:1"


TEXT = 'so\n<tool_call>{"name": "f", "arguments": {"text": "a"}}</tool_call>\n<tool_call>{"name": "g"}</tool_call>'


@pytest.mark.parametrize(
    ("fields", "options", "names"),
    [
        ({}, {}, ["f", "g"]),
        ({"parallel_tool_calls": False}, {}, ["f"]),
        ({"tools": tools()[:1]}, {}, ["f"]),
        ({"tool_choice": "none"}, {}, None),
        ({"tools": []}, {}, None),
        ({}, {"tool_call_parser": None}, None),
    ],
    ids=["all", "one-at-a-time", "undeclared", "none", "no-tools", "no-parser"],
)
async def test_which_calls_are_made(fields: Any, options: Any, names: list[str] | None) -> None:
    async with serving(saying(TEXT), **{"tool_call_parser": "hermes", **options}) as client:
        [choice] = (await ask(client, **{"tools": tools(), **fields}))["choices"]
        stream = await streamed(client, **{"tools": tools(), **fields})
    message = choice["message"]
    assert stream["message"]["content"] == message["content"] == (TEXT if names is None else "so")
    assert [call["function"]["name"] for call in message.get("tool_calls", ())] == (names or [])
    assert [call["name"] for call in stream["calls"]] == (names or [])
    assert choice["finish_reason"] == ("stop" if names is None else "tool_calls")


async def test_a_call_that_is_cut_off_stays_cut_off() -> None:
    text = TEXT[: TEXT.index('"a"') + 2]
    async with serving(saying(text, LENGTH), tool_call_parser="qwen") as client:
        [choice] = (await ask(client, tools=tools()))["choices"]
        stream = await streamed(client, tools=tools())
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"text": "a'
    assert stream["calls"][0]["arguments"] == '{"text": "a'
    assert choice["finish_reason"] == "length" == stream["finish"][0]


async def test_tools_make_special_tokens_visible() -> None:
    engine = saying("x")
    async with serving(engine) as client:
        await ask(client)
        await ask(client, tools=tools())
        await ask(client, tools=tools(), tool_choice="none")
    requests: list[GenerateRequest] = engine.requests  # type: ignore[attr-defined]
    assert [request.sampling.skip_special_tokens for request in requests] == [True, False, True]


@pytest.mark.parametrize(
    ("choice", "single"), [("required", False), ({"type": "function", "function": {"name": "f"}}, True)]
)
async def test_forced_calls_are_made_by_a_grammar(choice: Any, single: bool) -> None:
    text = '[{"name": "f", "parameters": {"text": "a"}}]'
    engine = saying(text)
    async with serving(engine, reasoning_parser="deepseek-r1") as client:
        [answer] = (await ask(client, tools=tools(), tool_choice=choice))["choices"]
        stream = await streamed(client, tools=tools(), tool_choice=choice)
    assert made(answer["message"]["tool_calls"]) == [("f", {"text": "a"})] == made(stream["calls"])
    requests: list[GenerateRequest] = engine.requests  # type: ignore[attr-defined]
    grammar = requests[0].sampling.grammar
    assert grammar is not None and grammar.kind == "json_schema"
    schema = json.loads(grammar.text)
    assert schema["type"] == "array" and schema["minItems"] == 1 and (schema.get("maxItems") == 1) == single


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tool_choice": "required"}, "Tools cannot be empty if tool choice is set to required."),
        ({"tool_choice": {"function": {"name": "f"}}}, "set to a specific tool."),
        ({"tools": tools(), "tool_choice": {"function": {"name": "h"}}}, "Tool 'h' not found in tools list."),
        ({"tools": tools(), "tool_choice": {"function": {}}}, "tool_choice must be"),
        ({"tools": tools(), "tool_choice": "always"}, "tool_choice"),
        ({"tools": tools(), "tool_choice": "required", "regex": "a"}, "cannot be combined with response_format"),
        ({"tools": [{"function": {"name": "f", "parameters": []}}]}, "Tool 0 function has invalid 'parameters' schema"),
        ({"tools": [{"type": "retrieval", "function": {"name": "f"}}]}, "tools[0].type must be function"),
        ({"parallel_tool_calls": 1, "tools": tools()}, "parallel_tool_calls"),
        ({"separate_reasoning": 1}, "separate_reasoning"),
        ({"reasoning": {"enabled": 1}}, "enabled"),
    ],
)
async def test_refusals(fields: dict[str, Any], message: str) -> None:
    async with serving(saying("x"), tool_call_parser="hermes") as client:
        response = await client.post(CHAT, json=body(**fields))
        assert response.status == 400
        assert message in (await response.json())["message"]


@pytest.mark.parametrize(
    ("parser", "template", "text", "finish", "reasoning", "content", "tokens"),
    [
        ("qwen3", "", "<think>abc", LENGTH, "abc", "", 10),
        ("qwen3", TEMPLATE, "abc</think>def", STOP, "abc", "def", 11),
        ("qwen3", "", "<think></think>x", STOP, None, "x", 15),
        ("qwen3", "", "plain", STOP, None, "plain", 0),
        ("deepseek-r1", "", "plain", STOP, "plain", "", 5),
        ("deepseek-r1", "", "<think>\nab\n</think>\n\ncd", STOP, "ab", "cd", 19),
        ("qwen3", TEMPLATE, "a `</think>` b", STOP, "a `", "` b", 11),
        ("kimi", "", "◁think▷ab◁/think▷cd", STOP, "ab", "cd", 17),
        ("gpt-oss", "", HARMONY, STOP, "ab", "cd", 39),
        ("minimax-append-think", "", "ab</think>cd", STOP, None, "<think>ab</think>cd", 0),
    ],
)  # fmt: skip
@pytest.mark.parametrize("with_tools", [False, True])
async def test_reasoning(
    parser: str, template: str, text: str, finish: FinishReason, reasoning: str, content: str, tokens: int,
    with_tools: bool,
) -> None:  # fmt: skip
    """B16"""
    fields: dict[str, Any] = {"tools": tools()} if with_tools else {}
    options = {"reasoning_parser": parser, "tool_call_parser": "gpt-oss" if parser == "gpt-oss" else "hermes"}
    async with serving(saying(text, finish), template or "q", **options) as client:
        reply = await ask(client, **fields)
        stream = await streamed(client, **fields)
        held = await streamed(client, stream_reasoning=False, **fields)
    message = reply["choices"][0]["message"]
    for one in (message, stream["message"], held["message"]):
        assert (one["reasoning_content"], one["content"]) == (reasoning, content)
    assert reply["choices"][0]["finish_reason"] == finish.type == stream["finish"][0]
    for usage in (reply["usage"], stream["usage"]):
        assert usage["reasoning_tokens"] == tokens
        assert usage["completion_tokens_details"] == ({"reasoning_tokens": tokens} if tokens else None)


async def test_an_end_marker_that_is_a_token_is_counted_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Letters, "token_to_id", lambda self, token: ord("]") if token == "[/THINK]" else None)
    async with serving(saying("[THINK]ab[/THINK]cd"), reasoning_parser="mistral") as client:
        reply = await ask(client, reasoning_effort="high")
    assert reply["choices"][0]["message"]["content"] == "cd"
    assert reply["usage"]["reasoning_tokens"] == len("[THINK]")


async def test_reasoning_can_be_left_in_the_text() -> None:
    text = "<think>ab</think>cd"
    async with serving(saying(text), reasoning_parser="qwen3") as client:
        for fields in ({"separate_reasoning": False}, {"chat_template_kwargs": {"enable_thinking": False}}):
            message = (await ask(client, **fields))["choices"][0]["message"]
            assert (message["content"], message["reasoning_content"]) == (text, None)
        message = (await ask(client, reasoning_effort="none"))["choices"][0]["message"]
        assert message["content"] == text


@pytest.mark.parametrize(
    ("final", "text", "expected"),
    [("<think>so", "ab</think>cd", ("ab", "cd")), ("<think>so</think>then", "ab", (None, "ab"))],
)
async def test_a_continued_answer_goes_on_where_it_was(final: str, text: str, expected: Any) -> None:
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": final}]
    async with serving(saying(text), reasoning_parser="deepseek-r1") as client:
        reply = await ask(client, messages=messages, continue_final_message=True)
    message = reply["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == expected


async def test_reasoning_then_calls() -> None:
    text = f"<think>hm <tool_call></think>\n\n{TEXT}"
    async with serving(saying(text, size=3), tool_call_parser="qwen", reasoning_parser="qwen3") as client:
        message = (await ask(client, tools=tools()))["choices"][0]["message"]
        stream = await streamed(client, tools=tools(), logprobs=False)
    assert message["reasoning_content"] == "hm <tool_call>" == stream["message"]["reasoning_content"]
    assert message["content"] == "so" == stream["message"]["content"]
    assert made(message["tool_calls"]) == [("f", {"text": "a"}), ("g", {})] == made(stream["calls"])


async def test_auto_goes_by_the_template() -> None:
    template = "{# <tool_call> <think> enable_thinking #}q"
    options = {"tool_call_parser": "auto", "reasoning_parser": "auto"}
    async with serving(saying(f"<think>hm</think>{TEXT}"), template, **options) as client:
        message = (await ask(client, tools=tools()))["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"], len(message["tool_calls"])) == ("hm", "so", 2)


async def test_parsers_as_routes() -> None:
    async with serving(saying("x")) as client:
        response = await client.post(
            "/parse_function_call", json={"text": TEXT, "tools": tools(), "tool_call_parser": "qwen"}
        )
        assert await response.json() == {
            "normal_text": "so",
            "calls": [
                {"tool_index": 0, "name": "f", "parameters": '{"text": "a"}'},
                {"tool_index": 1, "name": "g", "parameters": "{}"},
            ],
        }
        response = await client.post(
            "/separate_reasoning",
            json={"text": "ab</think>cd", "reasoning_parser": "deepseek-r1", "return_blocks": True},
        )
        assert await response.json() == {
            "reasoning_text": "ab",
            "text": "cd",
            "reasoning_blocks": ["ab"],
            "text_blocks": ["cd"],
            "blocks": [{"type": "reasoning", "text": "ab"}, {"type": "text", "text": "cd"}],
        }
        response = await client.post("/separate_reasoning", json={"text": "x", "reasoning_parser": "no"})
        assert response.status == 400 and "deepseek-r1" in await response.text()
