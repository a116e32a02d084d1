"""Information, tokenizer, health, keys and metrics (acceptance section 7)."""

from __future__ import annotations

import asyncio
import re
from typing import Any
from urllib.parse import urlsplit

import pytest

from sglang_lite import __version__
from tests.support.server import LocalServer, greedy, resident_bytes


async def test_tokenize_and_back(server: LocalServer) -> None:
    """C610"""
    for prefix in ("", "/v1"):
        reply = (await server.post(f"{prefix}/tokenize", {"prompt": "A€"})).json()
        assert reply == {"tokens": [65, 226, 130, 172], "count": 4, "max_model_len": 1024}
        assert (await server.post(f"{prefix}/detokenize", {"tokens": reply["tokens"]})).json() == {"text": "A€"}


async def test_tokenize_lists_and_messages(server: LocalServer) -> None:
    several = (await server.post("/tokenize", {"prompt": ["A", "XXX"]})).json()
    assert (several["tokens"], several["count"]) == ([[65], [256, 88]], [1, 2])
    messages = [{"role": "user", "content": "A"}]
    assert (await server.post("/tokenize", {"messages": messages})).json()["count"] == len("user:A")
    assert (await server.post("/detokenize", {"tokens": []})).json() == {"text": ""}


@pytest.mark.parametrize(
    "body",
    [{}, {"prompt": "A", "messages": []}, {"prompt": 5}, {"prompt": ["A", 5]}, {"messages": []}],
)
async def test_tokenize_needs_one_source(server: LocalServer, body: dict[str, Any]) -> None:
    reply = await server.post("/tokenize", body)
    assert reply.status == 400
    assert reply.json()["object"] == "error"


@pytest.mark.parametrize(
    ("tokens", "status", "text"),
    [
        ([[65, 66], [67]], 200, ["AB", "C"]),
        (["x"], 400, None),
        (-1, 400, None),
        ([-1], 400, None),
        (260, 400, None),
        ([260], 400, None),
        ([True], 400, None),
        ([[65], 66], 400, None),
        (None, 400, None),
    ],
)
async def test_detokenize(server: LocalServer, tokens: Any, status: int, text: Any) -> None:
    """C611"""
    reply = await server.post("/detokenize", {"tokens": tokens})
    assert reply.status == status
    if status == 200:
        assert reply.json()["text"] == text


async def test_models(server: LocalServer) -> None:
    """C612"""
    body = (await server.get("/v1/models")).json()
    assert body["object"] == "list"
    card = body["data"][0]
    assert (card["id"], card["object"], card["owned_by"], card["root"]) == ("chain", "model", "sglang", "chain")
    assert card["max_model_len"] == 1024
    assert (await server.get("/v1/models/chain")).json()["id"] == "chain"
    missing = await server.get("/v1/models/other")
    assert missing.status == 404
    assert missing.json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize("path", ["/model_info", "/get_model_info"])
async def test_model_info(server: LocalServer, path: str) -> None:
    """C612"""
    body = (await server.get(path)).json()
    assert body["architectures"] == ["Qwen3ForCausalLM"]
    assert body["is_generation"] is True
    assert (body["vocab_size"], body["max_context_length"]) == (260, 1024)
    assert (body["bos_token_id"], body["eos_token_ids"], body["pad_token_id"]) == (257, [258], 259)
    assert body["weight_version"] == "default"


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
async def test_server_info(paged_server: LocalServer, path: str) -> None:
    """C612"""
    body = (await paged_server.get(path)).json()
    cache = body["kv_cache"]
    assert body["page_size"] == cache["page_size"] == 16
    assert cache["page_size_bytes"] == cache["page_size"] * cache["bytes_per_token"]
    assert cache["bytes_per_token"] == 2 * 2 * 64 * 4
    assert (body["tp_size"], body["dp_size"], body["served_model_name"]) == (1, 1, "chain")
    assert body["max_total_num_tokens"] == 65536
    assert body["internal_states"][0]["effective_max_running_requests_per_dp"] == body["max_running_requests"]
    assert body["status"] == "ready"


async def test_loads(server: LocalServer) -> None:
    body = (await server.get("/v1/loads")).json()
    load = body["loads"][0]
    assert body["version"] == __version__ == (await server.get("/server_info")).json()["version"]
    assert body["aggregate"] == {"total_tokens": 0}
    for name in ("dp_rank", "num_running_reqs", "num_waiting_reqs", "num_reqs", "available_cache_pages", "token_usage"):
        assert name in load
    assert set(load["queues"]) == {"waiting", "grammar", "paused", "retracted", "prealloc_ready"}
    core = (await server.get("/v1/loads?include=core")).json()["loads"][0]
    assert "memory" not in core
    bad = await server.get("/v1/loads?include=core,nonsense")
    assert bad.status == 400
    assert "Invalid include sections" in bad.text
    assert (await server.get("/v1/loads?dp_rank=x")).status == 400
    assert (await server.get("/v1/loads?dp_rank=1")).json()["loads"] == []
    text = await server.get("/v1/loads?format=prometheus")
    assert 'sglang_num_running_reqs{dp_rank="0"} 0' in text.text
    assert text.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    old = (await server.get("/get_load")).json()
    assert old[0]["num_reqs"] == 0 and old[0]["dp_rank"] == 0
    assert (await server.get("/get_loads")).json()["loads"][0]["num_reqs"] == 0


async def test_health(server: LocalServer) -> None:
    for path in ("/health", "/health_generate", "/ready", "/ping"):
        reply = await server.get(path)
        assert (reply.status, reply.body) == (200, b""), path
    assert (await server.get("/")).json() == "SGLang is running"
    assert (await server.call("HEAD", "/")).status == 200


async def test_health_generate_does_not_grow_anything(server: LocalServer) -> None:
    """C419. Client and front share this process; the limit of memory covers both."""
    address, numbers = urlsplit(server.url), iter(range(10_000))
    request = b"GET /health_generate HTTP/1.1\r\nHost: x\r\n\r\n"
    statuses: set[bytes] = set()

    async def ask() -> None:
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        for _ in numbers:
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            assert b"content-length: 0" in head.lower()
            statuses.add(head.partition(b"\r\n")[0])
        writer.close()
        await writer.wait_closed()

    await server.idle()
    before = (await server.get("/metrics")).text
    memory = resident_bytes()
    load = [asyncio.create_task(server.post("/generate", greedy("A", {"max_new_tokens": 900}))) for _ in range(4)]
    await asyncio.gather(*(ask() for _ in range(16)))
    assert (await server.load())["num_reqs"] <= 4
    assert {(await task).json()["text"] for task in load} == {"BCDA" * 225}
    assert statuses == {b"HTTP/1.1 200 OK"}
    after = (await server.get("/metrics")).text
    for name in ("sglang_requests_total", "sglang:num_requests_total"):
        assert sample(after, name) - sample(before, name) == 4
    assert sample(after, "sglang:num_aborted_requests_total") == sample(before, "sglang:num_aborted_requests_total")
    assert (await server.idle())["num_reqs"] == 0
    assert resident_bytes() - memory < 16 * 2**20


async def test_keys(uncached_server: LocalServer) -> None:
    server, url = uncached_server, "/v1/models"
    wrong: list[dict[str, str]] = [
        {"Authorization": "Bearer wrong"},
        {"Authorization": "user-key"},
        {"Authorization": "Bearer "},
    ]
    for headers in wrong:
        reply = await server.get(url, headers=headers)
        assert (reply.status, reply.json()) == (401, {"error": "Unauthorized"})
        assert (await server.get("/health", headers=headers)).status == 200
    assert (await server.get(url, headers={"Authorization": "bearer user-key"})).status == 200
    assert (await server.post("/flush_cache")).status == 401
    assert (await server.post("/flush_cache", headers={"Authorization": "Bearer admin-key"})).status == 200
    info = await server.get("/server_info")
    assert "user-key" not in info.text and "admin-key" not in info.text


async def test_cross_origin(server: LocalServer) -> None:
    reply = await server.call(
        "OPTIONS",
        "/v1/chat/completions",
        headers={"Origin": "https://example.org", "Access-Control-Request-Method": "POST"},
    )
    assert reply.status == 200
    assert "POST" in reply.headers["Access-Control-Allow-Methods"]
    assert reply.headers["Access-Control-Allow-Origin"] == "https://example.org"
    assert (await server.get("/health", headers={"Origin": "https://example.org"})).headers[
        "Access-Control-Allow-Credentials"
    ] == "true"


def sample(text: str, name: str) -> float:
    """Sum of the series of a metric."""
    found = re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
    assert found, f"{name} is missing"
    return sum(map(float, found))


async def test_metrics_are_off_by_default(paged_server: LocalServer) -> None:
    """C613"""
    assert (await paged_server.get("/metrics")).status == 404


async def test_metrics_count_good_and_broken_requests(server: LocalServer) -> None:
    """C613"""
    await server.idle()
    before = (await server.get("/metrics")).text
    await server.generate("A", sampling={"max_new_tokens": 5})
    task = asyncio.create_task(server.post("/generate", greedy("A", {"max_new_tokens": 1000})))
    async with asyncio.timeout(20):
        while (await server.load())["num_reqs"] != 1:
            await asyncio.sleep(0.01)
    during = (await server.get("/metrics")).text
    assert sample(during, "sglang_requests_in_flight") == 1
    assert sample(during, "sglang:num_running_reqs") == 1
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await server.idle()
    reply = await server.get("/metrics")
    after = reply.text
    assert reply.headers["Content-Type"].startswith("text/plain; version=0.0.4")

    def grown(name: str) -> float:
        return sample(after, name) - sample(before, name)

    assert grown("sglang_requests_total") == 2
    assert grown("sglang_requests_failed_total") == 1
    assert grown("sglang:num_aborted_requests_total") == 1
    assert grown("sglang:num_requests_total") == 1
    assert grown("sglang:time_to_first_token_seconds_count") >= 1
    assert grown("sglang:e2e_request_latency_seconds_count") == 1
    assert grown("sglang:generation_tokens_total") >= 5
    assert sample(after, "sglang_requests_in_flight") == 0
    assert sample(after, "sglang:num_running_reqs") == 0
    assert sample(after, "sglang:max_total_num_tokens") == 65536
    assert 'engine_type="unified"' in after and 'model_name="chain"' in after
    assert (await server.get("/metrics/")).status == 200
