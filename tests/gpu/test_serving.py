"""The demo model served from the device, decode steps from captured graphs and without."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.support.server import LocalServer, local_server

pytestmark = [pytest.mark.gpu, pytest.mark.demo_model, pytest.mark.timeout(1800)]

NEW_TOKENS = 32


@pytest_asyncio.fixture(scope="module", loop_scope="session", params=[False, True], ids=["graphs", "no-graphs"])
async def server(request: pytest.FixtureRequest, demo_model: Path) -> AsyncIterator[LocalServer]:
    async with local_server(
        demo_model, served_model_name="demo", device="cuda", dtype="bfloat16", disable_cuda_graph=request.param
    ) as started:
        yield started


@pytest.mark.asyncio(loop_scope="session")
async def test_recorded_answers(server: LocalServer, demo_goldens: list[dict[str, Any]]) -> None:
    """The records are float32; bfloat16 may part from them where two tokens are nearly as likely, not at once."""

    async def ask(case: dict[str, Any]) -> int:
        reply = await server.generate(input_ids=case["input_ids"], sampling={"max_new_tokens": NEW_TOKENS})
        pairs = zip(reply["output_ids"], case["output_ids"], strict=False)
        return next((index for index, (got, want) in enumerate(pairs) if got != want), NEW_TOKENS)

    agreement = await asyncio.gather(*(ask(case) for case in demo_goldens))
    assert sum(length > 0 for length in agreement) >= 0.9 * len(agreement)
    assert sum(agreement) / len(agreement) >= NEW_TOKENS / 4


@pytest.mark.asyncio(loop_scope="session")
async def test_a_full_batch_is_served(server: LocalServer, demo_goldens: list[dict[str, Any]]) -> None:
    """Tokens per second are printed (``pytest -s``), not judged."""
    prompts = [case["input_ids"] for case in demo_goldens]
    started = time.monotonic()
    sampling = {"max_new_tokens": 64, "ignore_eos": True}
    asked = (server.generate(input_ids=prompts[index % len(prompts)], sampling=sampling) for index in range(64))
    replies = await asyncio.gather(*asked)
    seconds = time.monotonic() - started
    tokens = sum(len(reply["output_ids"]) for reply in replies)
    print(f"{tokens} tokens in {seconds:.2f} s: {tokens / seconds:.0f} tokens/s")
    assert tokens == 64 * 64
