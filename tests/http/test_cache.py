"""Prefix cache and pages as a client sees them (acceptance section 6)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.support.server import LocalServer, greedy

ONE = {"max_new_tokens": 1}


def prompt(start: int, length: int) -> list[int]:
    """Printable ids of which the last one leads to a long chain."""
    return [33 + (start + index) % 30 for index in range(length - 1)] + [65]


async def twice(server: LocalServer, ids: list[int]) -> tuple[Any, Any]:
    await server.post("/flush_cache")
    return await server.generate(input_ids=ids, sampling=ONE), await server.generate(input_ids=ids, sampling=ONE)


async def test_full_hit_with_pages_of_one_token(server: LocalServer) -> None:
    """C501"""
    first, second = await twice(server, prompt(0, 40))
    assert first["meta_info"]["cached_tokens"] == 0
    assert second["meta_info"]["cached_tokens"] in (39, 40)
    assert first["output_ids"] == second["output_ids"]


async def test_whole_pages_are_found(paged_server: LocalServer) -> None:
    """C502"""
    first, second = await twice(paged_server, prompt(0, 40))
    assert first["meta_info"]["cached_tokens"] == 0
    assert second["meta_info"]["cached_tokens"] == 32


async def test_common_start_is_found(small_pages_server: LocalServer) -> None:
    """C504"""
    server = small_pages_server
    await server.generate(input_ids=[1, 2, 3, 4, 5, 6, 7, 8], sampling=ONE)
    second = await server.generate(input_ids=[1, 2, 3, 4, 40, 41, 42, 43], sampling=ONE)
    assert second["meta_info"]["cached_tokens"] == 4


async def test_without_a_cache_nothing_is_kept(uncached_server: LocalServer) -> None:
    """C505"""
    before = (await uncached_server.load())["available_cache_pages"]
    for _ in range(2):
        result = await uncached_server.generate(input_ids=prompt(3, 40), sampling=ONE)
        assert result["meta_info"]["cached_tokens"] == 0
        assert (await uncached_server.idle())["free_pages"] == before


@pytest.mark.parametrize("name", ["server", "paged_server"])
async def test_follow_up_turns_find_what_was_said(name: str, request: pytest.FixtureRequest) -> None:
    """C506: 5 turns, 8 clients"""
    server: LocalServer = request.getfixturevalue(name)
    page = server.engine.info.page_size

    async def talk(client: int) -> None:
        ids = prompt(client * 3, 20 + client)
        known = 0
        for turn in range(5):
            result = await server.generate(input_ids=ids, sampling={"max_new_tokens": 12})
            cached = result["meta_info"]["cached_tokens"]
            # The last token of an answer has no KV yet when the answer ends.
            assert max(0, known - 1) // page * page <= cached <= len(ids), (client, turn)
            known = len(ids) + len(result["output_ids"])
            ids = [*ids, *result["output_ids"], *prompt(client + 7 * turn, 9)]

    await asyncio.gather(*(talk(client) for client in range(8)))


async def test_requests_share_a_pool_that_is_too_small(tight_server: LocalServer) -> None:
    """C509"""
    sampling = {"max_new_tokens": 20, "ignore_eos": True}
    prompts = [prompt(0, 30), prompt(11, 30)]
    alone = [(await tight_server.generate(input_ids=ids, sampling=sampling))["output_ids"] for ids in prompts]
    together = await asyncio.gather(*(tight_server.generate(input_ids=ids, sampling=sampling) for ids in prompts))
    assert [result["output_ids"] for result in together] == alone
    load = await tight_server.idle()
    assert load["available_cache_pages"] == 64


async def test_small_prefill_budget_keeps_the_order(tight_server: LocalServer) -> None:
    """C515"""
    order: list[int] = []

    async def send(index: int) -> None:
        body = {**greedy(sampling={"max_new_tokens": 8}), "input_ids": prompt(index * 9, 6), "stream": True}
        async with tight_server.session.post(tight_server.url + "/generate", json=body) as response:
            async for _ in response.content:
                order.append(index)
                break
            await response.read()

    tasks = []
    for index in range(3):
        tasks.append(asyncio.create_task(send(index)))
        await asyncio.sleep(0.005)
    await asyncio.gather(*tasks)
    assert order == [0, 1, 2]


async def test_logprobs_are_those_of_a_cold_run(paged_server: LocalServer) -> None:
    """C512"""
    ids = prompt(5, 50)
    await paged_server.post("/flush_cache")
    results = [
        await paged_server.generate(input_ids=ids, sampling={"max_new_tokens": 8}, return_logprob=True)
        for _ in range(2)
    ]
    scored = [[entry[0] for entry in result["meta_info"]["output_token_logprobs"]] for result in results]
    assert results[1]["meta_info"]["cached_tokens"] > 0
    assert scored[1] == pytest.approx(scored[0], abs=1e-4)
