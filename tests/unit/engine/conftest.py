"""Engines over a real core process with a null executor."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest_asyncio

from sglang_lite.config import ServerConfig
from sglang_lite.engine.async_engine import AsyncEngine
from sglang_lite.frontend.request import GenerateRequest, GenerationOutput
from sglang_lite.types import SamplingParams

ALL_PAGES = 4096


def null_core(*arguments: str) -> tuple[str, ...]:
    """Command of a core without a model."""
    return (sys.executable, "-m", "tests.unit.engine.null_core", *arguments)


async def start_engine(model: Path, *arguments: str, **options: Any) -> AsyncEngine:
    config = ServerConfig(model_path=str(model), device="cpu", **options)
    return await AsyncEngine.start(config, command=null_core(*arguments), timeout=60)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(chain_model: Path) -> AsyncIterator[AsyncEngine]:
    """An engine whose steps take a millisecond."""
    async with await start_engine(chain_model, "1") as started:
        yield started


def ask(request_id: str, text: str | None = "A", max_new_tokens: int | None = 10, **more: Any) -> GenerateRequest:
    sampling = more.pop("sampling", {})
    return GenerateRequest(
        request_id=request_id,
        text=text,
        sampling=SamplingParams(temperature=0, max_new_tokens=max_new_tokens, **sampling),
        **more,
    )


async def run(engine: AsyncEngine, request: GenerateRequest) -> list[GenerationOutput]:
    return [output async for output in engine.generate(request)]


async def run_to_end(engine: AsyncEngine, request: GenerateRequest) -> GenerationOutput:
    return (await run(engine, request))[-1]


async def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


async def until_idle(engine: AsyncEngine) -> None:
    """Wait for the core to have no request; every page must be back then."""
    async with asyncio.timeout(20):
        while True:
            load = await engine.loads()
            if load.num_running + load.num_waiting == 0:
                break
    assert load.held_pages == 0
    assert load.free_pages + load.cached_pages == load.num_pages
