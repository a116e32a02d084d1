"""The demo model over HTTP: recorded greedy answers, alone, together and with a warm cache (C965)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio

from tests.support.server import LocalServer, local_server

pytestmark = pytest.mark.demo_model

QUESTION_IDS = [1, 4093, 198, 1780, 314, 216, 34, 1232, 216, 34, 47, 2, 198, 1, 520, 9531, 198]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def demo_server(demo_model: Path) -> AsyncIterator[LocalServer]:
    async with local_server(demo_model, served_model_name="demo", max_total_tokens=8192) as started:
        yield started


async def test_known_answers(demo_server: LocalServer) -> None:
    """C965"""
    capital = await demo_server.generate("The capital of France is", sampling={"max_new_tokens": 4})
    assert capital["output_ids"] == [7042, 30, 198, 198]
    answer = await demo_server.generate(input_ids=QUESTION_IDS, sampling={"max_new_tokens": 20})
    assert answer["text"] == "The answer is 4."
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": 2}
    assert answer["meta_info"]["completion_tokens"] == 7


async def test_recorded_answers_side_by_side_and_again(
    demo_server: LocalServer, demo_goldens: list[dict[str, Any]]
) -> None:
    """C125, C422: every prompt twice; the second time the prefix is cached."""
    limit = 8

    async def ask(case: dict[str, Any]) -> tuple[list[int], int]:
        result = await demo_server.generate(input_ids=case["input_ids"], sampling={"max_new_tokens": limit})
        return result["output_ids"], result["meta_info"]["cached_tokens"]

    cases = demo_goldens[:6]
    expected = [case["output_ids"][:limit] for case in cases]
    for _ in range(2):
        results = await asyncio.gather(*(ask(case) for case in cases))
        assert [ids for ids, _ in results] == expected
    assert sum(cached for _, cached in results) > 0


async def test_chat_through_the_official_client(demo_server: LocalServer, demo_goldens: list[dict[str, Any]]) -> None:
    case = next(case for case in demo_goldens if case["messages"])
    async with openai.AsyncOpenAI(base_url=f"{demo_server.url}/v1", api_key="none") as client:
        stream = await client.chat.completions.create(
            model="demo", messages=case["messages"], max_tokens=12, temperature=0, stream=True
        )
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert text and case["output_text"].startswith(text)
