"""A context of 131,072 tokens and a tokenizer that begins every prompt with a token (C408, B11, B12)."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from tests.support.chain_model import BOS, build_chain_model
from tests.support.server import LocalServer, greedy, local_server


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def roomy(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalServer]:
    model = build_chain_model(tmp_path_factory.mktemp("roomy"), context_length=131072)
    file = model / "tokenizer.json"
    begin: dict[str, Any] = {"SpecialToken": {"id": "<|bos|>", "type_id": 0}}
    document = json.loads(file.read_text())
    document["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [begin, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [begin, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|bos|>": {"id": "<|bos|>", "ids": [BOS], "tokens": ["<|bos|>"]}},
    }
    file.write_text(json.dumps(document))
    options: dict[str, Any] = {"page_size": 1, "max_total_tokens": 65536, "enable_metrics": True}
    async with local_server(model, **options) as started:
        yield started


async def running(server: LocalServer, count: int) -> None:
    async with asyncio.timeout(20):
        while (await server.load())["num_reqs"] != count:
            await asyncio.sleep(0.005)


async def test_c408_abort_all_of_32_long_requests(roomy: LocalServer) -> None:
    body = greedy("A", {"max_new_tokens": 8000, "ignore_eos": True})
    tasks = [asyncio.create_task(roomy.post("/generate", body)) for _ in range(32)]
    await running(roomy, 32)
    assert (await roomy.post("/abort_request", {"abort_all": True})).json()["success"]
    results = [(await task).json() for task in tasks]
    assert {result["meta_info"]["finish_reason"]["type"] for result in results} == {"abort"}
    assert (await roomy.generate("A", sampling={"max_new_tokens": 1}))["text"] == "B"


async def test_b12_eight_clients_leave_long_streams(roomy: LocalServer, caplog: pytest.LogCaptureFixture) -> None:
    """Within two seconds nothing of them is left, in /metrics and /server_info too, and the log has a line for each."""
    await roomy.post("/flush_cache")
    before = (await roomy.idle())["available_cache_pages"]
    body = {**greedy("A", {"max_new_tokens": 20000, "ignore_eos": True}), "stream": True}

    async def leave() -> None:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session:
            response = await session.post(roomy.url + "/generate", json=body)
            for _ in range(3):
                await response.content.readuntil(b"\n\n")
            response.close()

    with caplog.at_level(logging.INFO):
        await asyncio.gather(*(leave() for _ in range(8)))
        load = await roomy.idle(2.0)
    assert load["available_cache_pages"] == before
    lines = [record for record in caplog.records if record.name.startswith("sglang_lite")]
    assert len(lines) <= 8, [record.getMessage() for record in lines]
    text = (await roomy.get("/metrics")).text
    for name in ("sglang:num_running_reqs", "sglang:num_queue_reqs", "sglang_requests_in_flight"):
        values = [float(line.split()[-1]) for line in text.splitlines() if line.startswith((name + "{", name + " "))]
        assert values and sum(values) == 0, name
    state = (await roomy.get("/server_info")).json()["internal_states"][0]
    assert [value for name, value in state.items() if name.endswith("_reqs")] or "load" in state, sorted(state)


@pytest.mark.parametrize("stream", [False, True])
async def test_b11_an_empty_prompt_is_the_begin_token(roomy: LocalServer, stream: bool) -> None:
    """The chain model ends behind it at once."""
    native = await roomy.generate("", sampling={"max_new_tokens": 4})
    assert (native["meta_info"]["prompt_tokens"], native["meta_info"]["finish_reason"]["matched"]) == (1, 258)
    for prompt in ("", [""]):
        body: dict[str, Any] = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "stream": stream}
        reply = await roomy.post("/v1/completions", body)
        assert reply.status == 200, reply.text
        choice = (reply.events[-2] if stream else reply.json())["choices"][0]
        assert (choice["finish_reason"], choice["matched_stop"]) == ("stop", 258)
    empty: list[Any] = [[], [[]], [[1], []]]
    for ids in empty:
        assert (await roomy.post("/generate", {"input_ids": ids})).status == 400
        assert (await roomy.post("/v1/completions", {"prompt": ids})).status == 400


@pytest.mark.parametrize("content", ["", []])
async def test_b11_an_empty_message_is_what_the_template_makes_of_it(server: LocalServer, content: Any) -> None:
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 4, "temperature": 0}
    reply = await server.post("/v1/chat/completions", body)
    assert reply.status == 200, reply.text
    assert reply.json()["usage"]["prompt_tokens"] == len("user:")


async def test_b11_a_template_that_makes_nothing_is_a_400(chain_model: Path) -> None:
    options: dict[str, Any] = {"page_size": 1, "max_total_tokens": 256, "chat_template": "{{ messages[0].content }}"}
    async with local_server(chain_model, **options) as server:
        contents: list[Any] = ["", []]
        for content in contents:
            reply = await server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": content}]})
            assert reply.status == 400, reply.text
        reply = await server.post("/v1/embeddings", {"input": []})
        assert reply.status == 400
