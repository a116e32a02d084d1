"""Clients that come, leave, abort, pause and flush at random: nobody gets a wrong text and no page is lost."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from sglang_lite.engine.async_engine import AsyncEngine
from sglang_lite.types import RequestError
from tests.unit.engine.conftest import ask, start_engine, until, until_idle

CLIENTS = 150
EXPECTED = {"A": "BCDA" * 256, "0": "123456789", "a": "é🙂!", "p": "qXXrst"}


async def _client(engine: AsyncEngine, number: int, choice: random.Random) -> str:
    """One client's life; returns how it ended."""
    await asyncio.sleep(choice.random() * 0.8)
    start = choice.choice("A0ap")
    prompt = "ABCD" * choice.randrange(40) + start
    limit = choice.choice((1, 5, 40, 300))
    leaves_after = choice.choice((None, None, None, 1, 3))
    request = ask(f"c{number}", prompt, limit, stream=choice.random() < 0.7)
    expected = EXPECTED[start]
    stream = engine.generate(request)
    seen = 0
    try:
        async for output in stream:
            seen += 1
            assert expected.startswith(output.text.rstrip("\ufffd")), "a length limit may cut a character in two"
            if output.finish_reason is not None:
                if output.finish_reason.type == "length":
                    assert output.completion_tokens == limit
                elif output.finish_reason.type == "stop":
                    assert output.text == expected
                return output.finish_reason.type
            if seen == leaves_after:
                return "left"
    except RequestError as error:
        assert error.status == 412
        return "paused"
    finally:
        await stream.aclose()
    raise AssertionError("the stream ended without a finish reason")


async def _operator(engine: AsyncEngine, choice: random.Random) -> None:
    for _ in range(25):
        await asyncio.sleep(choice.random() * 0.06)
        match choice.randrange(5):
            case 0:
                engine.abort(f"c{choice.randrange(CLIENTS)}")
            case 1:
                await engine.flush_cache()
            case 2:
                await engine.pause(choice.choice(("in_place", "retract")))
                await engine.loads()
                await engine.resume()
            case 3:
                load = await engine.loads()
                assert load.free_pages + load.cached_pages + load.held_pages == load.num_pages
            case _:
                assert await engine.abort_all() >= 0


@pytest.mark.parametrize("seed", [1, 2])
async def test_turmoil(chain_model: Path, seed: int) -> None:
    choice = random.Random(seed)
    # A pool that is far too small for everybody makes the scheduler preempt as well.
    options = {"max_running_requests": 24, "max_total_tokens": 2048, "page_size": 4, "chunked_prefill_size": 32}
    async with await start_engine(chain_model, "1", **options) as engine:
        clients = [asyncio.create_task(_client(engine, i, random.Random(seed * 1000 + i))) for i in range(CLIENTS)]
        await _operator(engine, choice)
        async with asyncio.timeout(60):
            ends = await asyncio.gather(*clients)
        assert {"stop", "length"} <= set(ends)
        await until(lambda: engine.num_live == 0)
        await until_idle(engine)
        assert await engine.flush_cache()
        assert (await engine.loads()).free_pages == engine.info.num_pages
