"""OpenAI routes (acceptance section 7)."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.support.chain_model import SUCCESSOR_LOGPROB
from tests.support.server import LocalServer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def chat(content: Any = "A", **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], "temperature": 0, **fields}


async def test_chat_answer(server: LocalServer) -> None:
    """C601"""
    body = (await server.post(CHAT, chat(max_tokens=4, model="chain"))).json()
    choice = body["choices"][0]
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"] == "BCDA"
    assert choice["finish_reason"] == "length"
    assert body["object"] == "chat.completion" and body["model"] == "chain"
    assert body["usage"]["completion_tokens"] == 4
    assert body["usage"]["total_tokens"] == body["usage"]["prompt_tokens"] + 4
    assert body["id"].startswith("chatcmpl-") and body["id"].count("chatcmpl-") == 1


async def test_chat_usage_reports_cached_tokens(server: LocalServer) -> None:
    request = chat("a question that is asked twice A", max_tokens=1)
    first, second = [(await server.post(CHAT, request)).json()["usage"] for _ in range(2)]
    assert second["prompt_tokens_details"]["cached_tokens"] >= first["prompt_tokens"] - 1


async def test_chat_stream(server: LocalServer) -> None:
    """C602"""
    options = {"include_usage": True}
    events = (await server.post(CHAT, chat(max_tokens=4, stream=True, stream_options=options))).events
    assert events[-1] == "[DONE]"
    assert events[0]["choices"][0]["delta"]["role"] == "assistant"
    deltas = [event["choices"][0]["delta"] for event in events[:-1] if event["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas) == "BCDA"
    assert all("reasoning_content" in delta for delta in deltas)
    assert events[-2]["choices"] == [] and events[-2]["usage"]["completion_tokens"] == 4
    assert events[-3]["choices"][0]["finish_reason"] == "length"
    assert len({event["id"] for event in events[:-1]}) == 1


async def test_continuous_usage(server: LocalServer) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = (await server.post(CHAT, chat(max_tokens=4, stream=True, stream_options=options))).events[:-1]
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts) and counts[-1] == 4


@pytest.mark.parametrize("source", ["header", "rid", "request_id"])
@pytest.mark.parametrize(("path", "prefix"), [(CHAT, "chatcmpl-"), (COMPLETIONS, "cmpl-")])
async def test_ids_are_prefixed_once(server: LocalServer, source: str, path: str, prefix: str) -> None:
    """C603"""
    body = {**chat(max_tokens=1), "prompt": "A"} if path == COMPLETIONS else chat(max_tokens=1)
    for given in (f"{prefix}abc", "abc"):
        headers = {"X-Request-Id": given} if source == "header" else {}
        fields = {} if source == "header" else {source: given}
        reply = await server.post(path, {**body, **fields}, headers=headers)
        assert reply.json()["id"] == f"{prefix}abc"


async def test_equal_header_ids_do_not_collide(server: LocalServer) -> None:
    """B14"""
    import asyncio

    body = chat(max_tokens=50)
    replies = await asyncio.gather(*(server.post(CHAT, body, headers={"X-Request-Id": "twin"}) for _ in range(4)))
    assert {reply.status for reply in replies} == {200}
    assert {reply.json()["id"] for reply in replies} == {"chatcmpl-twin"}


async def test_newer_limit_wins(server: LocalServer) -> None:
    """C604"""
    body = (await server.post(CHAT, chat(max_tokens=2, max_completion_tokens=3))).json()
    assert body["usage"]["completion_tokens"] == 3


async def test_completions_of_a_list_with_echo(server: LocalServer) -> None:
    """C605"""
    request = {"prompt": ["A", "0"], "max_tokens": 3, "temperature": 0, "echo": True}
    body = (await server.post(COMPLETIONS, request)).json()
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [(0, "ABCD"), (1, "0123")]
    assert body["id"].startswith("cmpl-") and body["object"] == "text_completion"
    assert body["usage"]["prompt_tokens"] == 2 and body["usage"]["completion_tokens"] == 6


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [("A", ["BC"]), ([65], ["BC"]), (["A", "0"], ["BC", "12"]), ([[65], [48]], ["BC", "12"])],
    ids=["text", "ids", "texts", "lists-of-ids"],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_kinds_of_prompts(server: LocalServer, prompt: Any, texts: list[str], stream: bool) -> None:
    reply = await server.post(COMPLETIONS, {"prompt": prompt, "max_tokens": 2, "temperature": 0, "stream": stream})
    if not stream:
        assert [choice["text"] for choice in reply.json()["choices"]] == texts
        return
    found = [""] * len(texts)
    for event in reply.events[:-1]:
        for choice in event["choices"]:
            found[choice["index"]] += choice["text"]
    assert found == texts


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("limit", [0, 1])
@pytest.mark.parametrize("prompt", ["0123", [48, 49, 50, 51]], ids=["text", "ids"])
async def test_scoring_a_prompt(server: LocalServer, prompt: Any, limit: int, stream: bool) -> None:
    """B09"""
    body = {"prompt": prompt, "max_tokens": limit, "echo": True, "logprobs": 1, "stream": stream, "temperature": 0}
    body |= {"stream_options": {"include_usage": True}} if stream else {}
    reply = await server.post(COMPLETIONS, body)
    assert reply.status == 200, reply.text
    parts = [event["choices"][0] for event in reply.events[:-2]] if stream else [reply.json()["choices"][0]]
    usage = reply.events[-2]["usage"] if stream else reply.json()["usage"]
    logprobs: dict[str, list[Any]] = {}
    for part in parts:
        for name, values in (part["logprobs"] or {}).items():
            logprobs.setdefault(name, []).extend(values)
    text = "".join(part["text"] for part in parts)
    assert text == "01234"[: 4 + limit]
    assert {len(values) for values in logprobs.values()} == {4 + limit}
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["token_logprobs"][1:] == pytest.approx([SUCCESSOR_LOGPROB] * (3 + limit), abs=1e-3)
    assert logprobs["text_offset"] == list(range(4 + limit))
    assert usage["completion_tokens"] == limit


async def test_offsets_count_characters(server: LocalServer) -> None:
    body = {"prompt": "é🙂A", "max_tokens": 1, "echo": True, "logprobs": 0, "temperature": 0}
    choice = (await server.post(COMPLETIONS, body)).json()["choices"][0]
    assert choice["text"] == "é🙂AB"
    assert choice["logprobs"]["text_offset"] == [0, 0, 1, 1, 1, 1, 2, 3]
    assert choice["logprobs"]["top_logprobs"] is None


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("prompt", "text", "offsets"),
    [([257, 65], "AB", [0, 0, 1]), ("<|bos|>A", "<|bos|>AB", [0, 7, 8]), ([65, 258, 48], "A01", [0, 1, 1, 2])],
    ids=["hidden", "written-out", "in-the-middle"],
)
async def test_offsets_count_special_tokens_only_where_they_are_shown(
    server: LocalServer, prompt: Any, text: str, offsets: list[int], stream: bool
) -> None:
    """B09"""
    body = {"prompt": prompt, "max_tokens": 1, "echo": True, "logprobs": 1, "temperature": 0, "stream": stream}
    reply = await server.post(COMPLETIONS, body)
    parts = [event["choices"][0] for event in reply.events[:-1]] if stream else reply.json()["choices"]
    assert "".join(part["text"] for part in parts) == text
    assert [offset for part in parts for offset in (part["logprobs"] or {}).get("text_offset", [])] == offsets


async def test_several_choices(server: LocalServer) -> None:
    request = {"prompt": ["A", "0"], "max_tokens": 2, "temperature": 0, "n": 2}
    body = (await server.post(COMPLETIONS, request)).json()
    assert [choice["text"] for choice in body["choices"]] == ["BC", "BC", "12", "12"]
    assert body["usage"]["prompt_tokens"] == 2 and body["usage"]["completion_tokens"] == 8
    events = (await server.post(CHAT, chat(max_tokens=2, n=3, stream=True))).events[:-1]
    found = ["", "", ""]
    for event in events:
        choice = event["choices"][0]
        found[choice["index"]] += choice["delta"].get("content") or ""
    assert found == ["BC"] * 3


@pytest.mark.parametrize(
    ("content", "fields", "reason", "matched"),
    [
        ("G", {}, "stop", 258),
        ("A", {"stop": "DA"}, "stop", "DA"),
        ("A", {"max_tokens": 2}, "length", None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_what_ended_a_chat(
    server: LocalServer, content: str, fields: dict[str, Any], reason: str, matched: Any, stream: bool
) -> None:
    """C609"""
    reply = await server.post(CHAT, chat(content, stream=stream, **fields))
    choice = reply.events[-2]["choices"][0] if stream else reply.json()["choices"][0]
    assert (choice["finish_reason"], choice["matched_stop"]) == (reason, matched)


async def test_text_parts_and_continued_answers(server: LocalServer) -> None:
    parts = [{"type": "text", "text": "hello"}, {"type": "text", "text": "A"}]
    assert (await server.post(CHAT, chat(parts, max_tokens=2))).json()["choices"][0]["message"]["content"] == "BC"
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "so far 0"}]
    body = {"messages": messages, "continue_final_message": True, "temperature": 0, "max_tokens": 3}
    assert (await server.post(CHAT, body)).json()["choices"][0]["message"]["content"] == "123"


async def test_tools_are_accepted(server: LocalServer) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    assert (await server.post(CHAT, chat(max_tokens=1, tools=tools))).status == 200


async def test_model_names_that_are_served(server: LocalServer) -> None:
    for name in ("chain", "default", server.context.config.model_path):
        reply = await server.post(COMPLETIONS, {"model": name, "prompt": "G", "temperature": 0})
        assert (reply.status, reply.json()["model"]) == (200, "chain")


async def test_official_client(server: LocalServer) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        messages: list[Any] = [{"role": "user", "content": "A"}]
        answer = await client.chat.completions.create(model="chain", messages=messages, max_tokens=4, temperature=0)
        assert answer.choices[0].message.content == "BCDA"
        assert answer.usage is not None and answer.usage.completion_tokens == 4
        stream = await client.chat.completions.create(
            model="chain",
            messages=messages,
            max_tokens=4,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            logprobs=True,
        )
        text, usage = "", None
        async for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                text += choice.delta.content or ""
        assert text == "BCDA"
        assert usage is not None and usage.completion_tokens == 4
        completion = await client.completions.create(model="chain", prompt="0", temperature=0)
        assert completion.choices[0].text == "123456789"
        assert [model.id async for model in client.models.list()] == ["chain"]
        with pytest.raises(openai.BadRequestError, match="temperature"):
            await client.chat.completions.create(model="chain", messages=messages, temperature=-1)
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("unknown")
