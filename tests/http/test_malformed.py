"""Malformed input: always a 4xx that names the field, and the server serves on (acceptance section 4)."""

from __future__ import annotations

import asyncio
import gc
import json
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.support.server import LocalServer, greedy, resident_bytes

GENERATE, COMPLETIONS, CHAT = "/generate", "/v1/completions", "/v1/chat/completions"


async def check_alive(server: LocalServer) -> None:
    assert (await server.generate("A", sampling={"max_new_tokens": 1}))["text"] == "B"


def user(content: Any, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], **fields}


BAD_GENERATE: list[tuple[str, dict[str, Any], str]] = [
    ("C301-nested-ids-for-one-prompt", {"text": "A", "token_ids_logprob": [[0]]}, "token_ids_logprob"),
    ("C303-empty-ids", {"input_ids": []}, "input_ids"),
    ("C303-empty-text", {"text": ""}, "text"),
    ("B11-empty-text-of-two", {"text": ["A", ""]}, "text[1]"),
    ("C303-both", {"text": "A", "input_ids": [65]}, "input_ids"),
    ("C303-neither", {}, "text"),
    ("B10-negative-id", {"input_ids": [-1]}, "input_ids"),
    ("B10-huge-id", {"input_ids": [2**31]}, "input_ids"),
    ("B10-bigger-than-64-bit", {"input_ids": [2**70]}, "input_ids"),
    ("B10-out-of-vocabulary", {"input_ids": [260]}, "259"),
    ("B10-float-id", {"input_ids": [1.5]}, "input_ids"),
    ("B10-boolean-id", {"input_ids": [True]}, "input_ids"),
    ("B11-one-empty-prompt-of-two", {"input_ids": [[1], []]}, "input_ids"),
    ("B10-negative-bias", greedy("A", {"logit_bias": {"-1": 5}}), "logit_bias"),
    ("B10-bias-out-of-vocabulary", greedy("A", {"logit_bias": {"999999": 5}}), "logit_bias"),
    ("B10-bias-of-no-token", greedy("A", {"logit_bias": {"abc": 1}}), "logit_bias"),
    ("B10-huge-bias", greedy("A", {"logit_bias": {"65": 1e9}}), "logit_bias"),
    ("B10-stop-token", greedy("A", {"stop_token_ids": [10**9]}), "stop_token_ids"),
    ("B10-scored-token", {"text": "A", "return_logprob": True, "token_ids_logprob": [-3]}, "token_ids_logprob"),
    ("B14-repeated-ids", {"text": ["A", "B"], "rid": ["x", "x"]}, "Duplicate"),
    ("B14-empty-id", {"text": "A", "rid": ""}, "rid"),
    ("B14-long-id", {"text": "A", "rid": "x" * 2**20}, "rid"),
    ("B14-line-break-in-id", {"text": "A", "rid": "a\nb"}, "rid"),
    ("too-few-ids", {"text": ["A", "B"], "rid": ["x"]}, "rids length mismatch"),
    ("text-number", {"text": 1}, "text"),
    ("text-mixed", {"text": ["A", 1]}, "text"),
    ("ids-mixed", {"input_ids": [[1], 2]}, "input_ids"),
    ("stream-text", {"text": "A", "stream": "yes"}, "stream"),
    ("parameters-list-for-one", {"text": "A", "sampling_params": [{}]}, "sampling_params"),
    ("parameters-too-many", {"text": ["A", "B"], "sampling_params": [{}]}, "sampling_params"),
    ("parameters-number", {"text": "A", "sampling_params": 3}, "sampling_params"),
    ("unknown-parameter", {"text": "A", "sampling_params": {"bogus": 1}}, "bogus"),
    ("n-differs", {"text": ["A", "B"], "sampling_params": [{"n": 1}, {"n": 2}]}, "parallel_sample_num"),
    (
        "n-list-logprob",
        {"text": ["A", "B"], "sampling_params": {"n": 2}, "return_logprob": [True, False]},
        "return_logprob",
    ),
    ("top-logprobs-negative", {"text": "A", "top_logprobs_num": -1}, "top_logprobs_num"),
    ("start-beyond-prompt", {"text": "A", "return_logprob": True, "logprob_start_len": 9}, "logprob_start_len"),
    ("start-wrong-type", {"text": "A", "logprob_start_len": "x"}, "logprob_start_len"),
    ("priority-text", {"text": "A", "priority": "high"}, "priority"),
    ("rank-out-of-range", {"text": "A", "routed_dp_rank": 3}, "routed_dp_rank"),
    ("salt-number", {"text": "A", "cache_salt": 4}, "cache_salt"),
    ("salts-too-few", {"text": ["A", "B"], "cache_salt": ["x"]}, "cache_salt"),
    ("salt-long", {"text": "A", "cache_salt": "x" * 10**6}, "cache_salt"),
    (
        "more-tokens-than-numbers",
        {"text": "A", "sampling_params": {"max_new_tokens": None, "min_new_tokens": 2**40}},
        "min_new_tokens",
    ),
    ("regex", greedy("A", {"regex": "[0-9"}), "regex"),
    ("lora", {"text": "A", "lora_path": "x"}, "lora_path"),
    ("stop-regex-broken", greedy("A", {"stop_regex": "("}), "stop_regex"),
    ("too-many-prompts", {"text": ["A"] * 8193}, "8192"),
    ("too-many-choices", {"input_ids": [[1]] * 100, "sampling_params": {"n": 100}}, "8192"),
    ("lone-surrogate", {"text": "\ud800"}, "JSON"),
]


@pytest.mark.parametrize(("body", "named"), [pytest.param(b, n, id=i) for i, b, n in BAD_GENERATE])
@pytest.mark.parametrize("stream", [False, True], ids=["unary", "stream"])
async def test_bad_native_requests_are_named(
    server: LocalServer, body: dict[str, Any], named: str, stream: bool
) -> None:
    sent = {"stream": stream, **body}
    reply = await server.call("POST", GENERATE, data=json.dumps(sent).encode())
    assert reply.status == 400, reply.text
    assert named in reply.json()["error"]["message"]
    await check_alive(server)


BAD_OPENAI: list[tuple[str, str, dict[str, Any], str]] = [
    ("C313-model", COMPLETIONS, {"prompt": "A", "model": "other"}, "model"),
    ("C313-chat-model", CHAT, user("A", model="other"), "model"),
    ("model-number", COMPLETIONS, {"prompt": "A", "model": 5}, "model"),
    ("B11-empty", COMPLETIONS, {"prompt": ""}, "prompt"),
    ("B11-list-of-empty", COMPLETIONS, {"prompt": [""]}, "prompt[0]"),
    ("B11-empty-list", COMPLETIONS, {"prompt": []}, "rompt"),
    ("B11-empty-ids", COMPLETIONS, {"prompt": [[]]}, "prompt"),
    ("no-prompt", COMPLETIONS, {}, "prompt"),
    ("prompt-number", COMPLETIONS, {"prompt": 7}, "prompt"),
    ("prompt-booleans", COMPLETIONS, {"prompt": [True]}, "prompt"),
    ("id-out-of-vocabulary", COMPLETIONS, {"prompt": [999], "echo": True}, "prompt[0] is 999"),
    ("chat-id-out-of-vocabulary", CHAT, {"input_ids": [999]}, "input_ids"),
    ("zero-tokens-without-echo", COMPLETIONS, {"prompt": "A", "max_tokens": 0}, "max_tokens"),
    ("negative-tokens", COMPLETIONS, {"prompt": "A", "max_tokens": -1}, "max_tokens"),
    ("too-many-prompts", COMPLETIONS, {"prompt": ["A"] * 100, "n": 100}, "8192"),
    ("n-zero", COMPLETIONS, {"prompt": "A", "n": 0}, "n must"),
    ("logprobs-negative", COMPLETIONS, {"prompt": "A", "logprobs": -1}, "logprobs"),
    ("logprobs-boolean", COMPLETIONS, {"prompt": "A", "logprobs": True}, "logprobs"),
    (
        "stream-options-without-stream",
        COMPLETIONS,
        {"prompt": "A", "stream_options": {"include_usage": True}},
        "stream",
    ),
    ("C316-no-messages", CHAT, {}, "messages"),
    ("C316-empty-messages", CHAT, {"messages": []}, "Messages cannot be empty"),
    ("C316-role", CHAT, {"messages": [{"role": "wizard", "content": "A"}]}, "role"),
    ("C316-content-number", CHAT, user(5), "content"),
    ("C316-image", CHAT, user([{"type": "image_url", "image_url": {"url": "x"}}]), "image_url"),
    ("C316-tools-object", CHAT, user("A", tools={}), "tools"),
    ("B11-null-content", CHAT, user(None), "content"),
    ("messages-object", CHAT, {"messages": {"role": "user"}}, "messages"),
    ("message-text", CHAT, {"messages": ["hello"]}, "messages"),
    ("template-messages", CHAT, user("A", chat_template_kwargs={"messages": []}), "chat_template_kwargs"),
    ("template-list", CHAT, user("A", chat_template_kwargs=[]), "chat_template_kwargs"),
    ("top-logprobs-alone", CHAT, user("A", top_logprobs=2), "top_logprobs"),
    ("zero-tokens", CHAT, user("A", max_tokens=0), "max_tokens"),
    ("more-tokens-than-numbers", CHAT, user("A", min_tokens=2**40), "min_tokens"),
    ("zero-completion-tokens", CHAT, user("A", max_completion_tokens=0), "max_completion_tokens"),
    ("json-object", CHAT, user("A", response_format={"type": "yaml"}), "response_format"),
    ("required-tools", CHAT, user("A", tool_choice="required"), "Tools cannot be empty"),
    ("temperature", CHAT, user("A", temperature="hot"), "temperature"),
    ("continue-user", CHAT, user("A", continue_final_message=True), "continue_final_message"),
]


@pytest.mark.parametrize(("path", "body", "named"), [pytest.param(p, b, n, id=i) for i, p, b, n in BAD_OPENAI])
async def test_bad_openai_requests_are_named(server: LocalServer, path: str, body: dict[str, Any], named: str) -> None:
    reply = await server.post(path, body)
    assert reply.status == 400, reply.text
    error = reply.json()
    assert named in error["message"]
    assert error["object"] == "error" and error["code"] == 400
    await check_alive(server)


@pytest.mark.parametrize("path", [GENERATE, COMPLETIONS, CHAT, "/tokenize", "/detokenize", "/abort_request"])
@pytest.mark.parametrize(
    "body",
    [b"null", b"[]", b'"x"', b"7", b"{broken", b"", b"\xff\xfe", b'{"a": 1e999}', b"[" * 50_000, b'{"a":' * 20_000],
    ids=["null", "array", "string", "number", "broken", "empty", "not-utf8", "huge-number", "nested", "nested-objects"],
)
async def test_bodies_that_are_no_object(server: LocalServer, path: str, body: bytes) -> None:
    """C305, C314"""
    reply = await server.call("POST", path, data=body, headers={"Content-Type": "application/json"})
    assert reply.status == 400, reply.text
    await check_alive(server)


async def test_large_bodies_leave_nothing_behind(server: LocalServer) -> None:
    """C314: the memory of this process, which holds client and front, is bounded however many of them come.

    The allocator may keep 64 MiB once; what leaks, leaks each time.
    """
    bodies = [b"[" * 50_000, json.dumps({"text": "B" * 10_000_000}).encode()]

    async def send_all(times: int) -> None:
        for body in bodies * times:
            assert (await server.call("POST", GENERATE, data=body)).status == 400
        gc.collect()

    await send_all(3)
    growths = []
    for _ in range(3):
        before = resident_bytes()
        await send_all(10)
        growths.append((resident_bytes() - before) / 2**20)
        if growths[-1] < 32:
            break
    assert growths[-1] < 32, f"MiB more: {growths}"
    await check_alive(server)


async def test_content_type_of_openai_routes(server: LocalServer) -> None:
    reply = await server.call("POST", COMPLETIONS, data=b'{"prompt":"A"}', headers={"Content-Type": "text/plain"})
    assert reply.status == 400
    assert "application/json" in reply.json()["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("field", ["text", "input_ids"])
async def test_prompt_over_the_context(server: LocalServer, stream: bool, field: str) -> None:
    """C307"""
    prompt: Any = "B" * 1025 if field == "text" else [66] * 1025
    reply = await server.post(GENERATE, {field: prompt, "stream": stream})
    assert reply.status == 400
    assert "1025" in reply.text and "1024" in reply.text


@pytest.mark.parametrize("path", [GENERATE, COMPLETIONS])
async def test_lengths_around_the_context(server: LocalServer, path: str) -> None:
    """B17: what fits is exactly as long as was asked, what does not is a 400 with the numbers."""

    async def send(prompt: int, limit: int | None) -> None:
        ids = [66] * (prompt - 1) + [65]
        if path == GENERATE:
            body: dict[str, Any] = {"input_ids": ids, "sampling_params": {"max_new_tokens": limit, "ignore_eos": True}}
        else:
            body = {"prompt": ids, "max_tokens": limit, "ignore_eos": True, "echo": limit == 0}
            if limit is None:
                body.pop("max_tokens")
        reply = await server.post(path, body)
        default = {GENERATE: 1024 - prompt, COMPLETIONS: min(16, 1024 - prompt)}[path]
        expected = default if limit is None else limit
        if limit == 0 and path == GENERATE:
            assert reply.status == 400 and "max_new_tokens" in reply.text
        elif prompt >= 1024 or prompt + expected > 1024:
            assert reply.status == 400, (prompt, limit, reply.text)
            assert "1024" in reply.text and str(prompt) in reply.text, (prompt, limit, reply.text)
        elif path == GENERATE:
            meta = reply.json()["meta_info"]
            assert (meta["prompt_tokens"], meta["completion_tokens"]) == (prompt, expected), (prompt, limit)
            assert meta["finish_reason"] == {"type": "length", "length": expected}
        else:
            answer = reply.json()
            usage = (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"])
            assert usage == (prompt, expected), (prompt, limit)
            assert answer["choices"][0]["finish_reason"] == "length"

    limits = (0, 1, 2, 16, None)
    await asyncio.gather(*(send(prompt, limit) for prompt in range(1007, 1027) for limit in limits))


async def test_limits_that_nobody_asked_for_give_way_to_the_context(server: LocalServer) -> None:
    """B17: the default of 128 tokens is no request for 128 tokens."""
    several = [{"ignore_eos": True}, {"ignore_eos": True, "max_new_tokens": 3}]
    ids = [66] * 1019 + [65]
    replies = (await server.post(GENERATE, {"input_ids": [ids, ids], "sampling_params": several})).json()
    assert [reply["meta_info"]["completion_tokens"] for reply in replies] == [4, 3]
    single = (await server.post(GENERATE, {"input_ids": ids, "sampling_params": {"ignore_eos": True}})).json()
    assert single["meta_info"]["finish_reason"] == {"type": "length", "length": 4}
    asked = await server.post(GENERATE, {"input_ids": ids, "sampling_params": {"max_new_tokens": 128}})
    assert asked.status == 400


@pytest.mark.parametrize("name", ["bootstrap_host", "bootstrap_port", "bootstrap_room"])
@pytest.mark.parametrize("path", [GENERATE, COMPLETIONS, CHAT])
async def test_disaggregation_needs_its_mode(server: LocalServer, path: str, name: str) -> None:
    """C309"""
    body = {"text": "A", "prompt": "A", **user("A"), name: 7}
    if path == GENERATE:
        body = {"text": "A", name: 7}
    reply = await server.post(path, body)
    assert reply.status == 501
    assert name in reply.text


async def test_rank_header_is_an_integer(server: LocalServer) -> None:
    """C312"""
    for path, body in ((GENERATE, {"text": "A"}), (CHAT, user("A")), (COMPLETIONS, {"prompt": "A"})):
        reply = await server.post(path, body, headers={"X-Data-Parallel-Rank": "abc"})
        assert reply.status == 400
        assert "X-Data-Parallel-Rank" in reply.text
    reply = await server.post(GENERATE, greedy("G"), headers={"X-Data-Parallel-Rank": "0"})
    assert reply.status == 200


@pytest.mark.parametrize("path", [GENERATE, COMPLETIONS, CHAT])
async def test_ten_megabytes_of_text(server: LocalServer, path: str) -> None:
    """C314"""
    text = "B" * 10_000_000
    body = {GENERATE: {"text": text}, COMPLETIONS: {"prompt": text}, CHAT: user(text)}[path]
    reply = await server.post(path, body)
    assert reply.status == 400
    assert "1024" in reply.text
    await check_alive(server)


async def test_body_over_the_limit(server: LocalServer) -> None:
    reply = await server.call("POST", GENERATE, data=b'{"text":"' + b"B" * (33 * 2**20) + b'"}')
    assert reply.status == 413
    await check_alive(server)


def bad_requests() -> list[bytes]:
    """One HTTP request of every kind of bad body that is short enough to be sent ten thousand times."""
    calls = [(GENERATE, json.dumps(body).encode()) for _, body, _ in BAD_GENERATE]
    calls += [(path, json.dumps(body).encode()) for _, path, body, _ in BAD_OPENAI]
    calls += [(path, body) for path in (GENERATE, CHAT) for body in (b"null", b"[]", b'"x"', b"{broken", b"", b"\xff")]
    head = "POST {} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n"
    return [head.format(path, len(body)).encode() + body for path, body in calls if len(body) < 10_000]


async def bad_statuses(server: LocalServer, requests: list[bytes], count: int) -> set[bytes]:
    """Send ``count`` of them over 50 connections that stay open; the status lines of the answers."""
    address, numbers = urlsplit(server.url), iter(range(count))
    statuses: set[bytes] = set()

    async def send() -> None:
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        for number in numbers:
            writer.write(requests[number % len(requests)])
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
            await reader.readexactly(int(length.partition(b":")[2]))
            statuses.add(head.partition(b"\r\n")[0])
        writer.close()
        await writer.wait_closed()

    await asyncio.gather(*(send() for _ in range(50)))
    return statuses


async def test_ten_thousand_bad_requests_leave_nothing_behind(server: LocalServer) -> None:
    """C306. Client and front share this process; the limit covers both."""
    requests = bad_requests()
    assert len(requests) > 70
    await bad_statuses(server, requests, 500)
    gc.collect()
    before = resident_bytes()
    assert await bad_statuses(server, requests, 10_000) == {b"HTTP/1.1 400 Bad Request"}
    gc.collect()
    growth = resident_bytes() - before
    assert growth < 8 * 2**20, f"{growth / 2**20:.1f} MiB more"
    load = await server.idle()
    assert load["num_used_tokens"] == 0
    await check_alive(server)


async def test_unknown_routes_and_methods(server: LocalServer) -> None:
    missing = await server.get("/nope")
    assert (missing.status, missing.json()["message"]) == (404, "Not Found")
    wrong = await server.get(GENERATE)
    assert (wrong.status, wrong.headers["Allow"]) == (405, "POST,PUT")
