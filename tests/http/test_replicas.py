"""A server of two data parallel replicas, guessing tokens: what clients and operators see of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest_asyncio

from tests.support.server import LocalServer, local_server


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def replicas(chain_model: Path) -> AsyncIterator[LocalServer]:
    async with local_server(
        chain_model,
        page_size=4,
        max_total_tokens=8192,
        dp_size=2,
        load_balance_method="total_requests",
        speculative_algorithm="NGRAM",
        enable_metrics=True,
    ) as started:
        yield started


async def generate(server: LocalServer, text: str, headers: dict[str, str] | None = None, **body: Any) -> Any:
    sampling = {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True}
    call = {"text": text, "sampling_params": sampling, **body}
    async with server.session.post(server.url + "/generate", json=call, headers=headers) as response:
        return response.status, await response.json()


async def fetch(server: LocalServer, path: str) -> Any:
    async with server.session.get(server.url + path) as response:
        assert response.status == 200
        return await response.json()


async def test_a_request_names_its_replica(replicas: LocalServer) -> None:
    status, first = await generate(replicas, "ABCD" * 8, {"X-Data-Parallel-Rank": "1"})
    assert (status, first["text"]) == (200, "ABCD" * 10)
    assert first["meta_info"]["cached_tokens"] == 0
    _, elsewhere = await generate(replicas, "ABCD" * 8, routed_dp_rank=0)
    assert elsewhere["meta_info"]["cached_tokens"] == 0, "replica 0 has a cache of its own"
    _, again = await generate(replicas, "ABCD" * 8, data_parallel_rank=1)
    assert again["meta_info"]["cached_tokens"] > 0
    status, refused = await generate(replicas, "A", routed_dp_rank=2)
    assert status == 400
    assert "routed_dp_rank=2 out of range [0, 2)" in str(refused)


async def test_a_session_stays_where_its_prefix_is(replicas: LocalServer) -> None:
    for number in range(4):
        prompt = f"{number}" * 24 + "A"
        _, first = await generate(replicas, prompt, session_id=f"session-{number}")
        _, again = await generate(replicas, prompt, session_id=f"session-{number}")
        assert (first["meta_info"]["cached_tokens"], again["meta_info"]["cached_tokens"]) == (0, 24)


async def test_loads_and_metrics_name_each_replica(replicas: LocalServer) -> None:
    await asyncio.gather(*(generate(replicas, "ABCD" * 4, routed_dp_rank=rank) for rank in (0, 1, 1)))
    loads = (await fetch(replicas, "/v1/loads"))["loads"]
    assert [load["dp_rank"] for load in loads] == [0, 1]
    for load in loads:
        assert load["max_total_num_tokens"] == 8192
        assert load["speculative"]["accept_length"] > 1
        assert 0 < load["speculative"]["accept_rate"] <= 1
    (one,) = (await fetch(replicas, "/v1/loads?dp_rank=1"))["loads"]
    assert one["dp_rank"] == 1
    assert [load["dp_rank"] for load in await fetch(replicas, "/get_load")] == [0, 1]
    states = (await fetch(replicas, "/server_info"))["internal_states"]
    assert [state["dp_rank"] for state in states] == [0, 1]
    async with replicas.session.get(replicas.url + "/metrics") as response:
        text = await response.text()
    for rank in (0, 1):
        assert f'sglang:num_used_tokens{{dp_rank="{rank}"' in text
        assert f'sglang:spec_accept_length{{dp_rank="{rank}"' in text


async def test_the_caches_of_all_replicas_are_flushed(replicas: LocalServer) -> None:
    for rank in (0, 1):
        await generate(replicas, "EFGH" * 8, routed_dp_rank=rank)
    async with replicas.session.post(replicas.url + "/flush_cache") as response:
        assert response.status == 200
    for rank in (0, 1):
        _, body = await generate(replicas, "EFGH" * 8, routed_dp_rank=rank)
        assert body["meta_info"]["cached_tokens"] == 0
