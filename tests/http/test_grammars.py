"""Constrained outputs over HTTP: every kind of grammar, how it fails, and what it is combined with."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.support.server import LocalServer, local_server

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "size": {"enum": [1, 2, 30]}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
TAG = {
    "structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}],
    "triggers": ["<f"],
}


@pytest_asyncio.fixture(scope="session", loop_scope="session", params=["xgrammar", "llguidance"])
async def constrained(request: pytest.FixtureRequest, chain_model: Path) -> AsyncIterator[LocalServer]:
    """A server with each backend; few pages, so that requests are preempted, and small chunks."""
    async with local_server(
        chain_model,
        page_size=1,
        max_total_tokens=2048,
        chunked_prefill_size=8,
        grammar_backend=request.param,
    ) as started:
        yield started


async def generate(server: LocalServer, prompt: str = "A", **parameters: Any) -> dict[str, Any]:
    body = {"text": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": 64, **parameters}}
    reply = await server.post("/generate", body)
    assert reply.status == 200, reply.text
    return dict(reply.json())


@pytest.mark.parametrize("temperature", [0, 1])
async def test_c217_regex(constrained: LocalServer, temperature: float) -> None:
    """C217."""
    answer = await generate(constrained, regex="[0-9]{3}", temperature=temperature)
    assert re.fullmatch("[0-9]{3}", answer["text"])
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": 258}
    assert answer["meta_info"]["completion_tokens"] == 4
