"""Routers in front of a real pair: ours, and SGLang's own ``sglang-router`` wheel."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.support.chain_model import build_chain_model
from tests.support.disaggregated_pair import DECODE, PATIENT, PREFILL, Pair
from tests.support.server import ROOT, free_port

RUST = os.environ.get("SGLANG_ROUTER") or shutil.which("sglang-router")
CHAT = {"model": "chain", "messages": [{"role": "user", "content": "A"}], "max_tokens": 6, "temperature": 0}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    directory = tmp_path_factory.mktemp("pair")
    model = build_chain_model(directory / "chain")
    pair = Pair("tcp", model, directory, with_text=True, environment=PATIENT, options=["--served-model-name", "chain"])
    try:
        pair.start()
        yield pair
    finally:
        pair.close()


@asynccontextmanager
async def running(command: list[str], port: int, log: Path) -> AsyncIterator[str]:
    """A router program, once it takes requests for the pair."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    url = f"http://127.0.0.1:{port}"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment, cwd=ROOT)
    try:
        async with asyncio.timeout(40):
            while (await ask(url, "/v1/chat/completions", CHAT))[0] != 200:
                assert process.poll() is None, log.read_text()
                await asyncio.sleep(0.1)
        yield url
    finally:
        process.kill()
        process.wait()


async def ask(url: str, path: str, body: dict[str, Any]) -> tuple[int, str]:
    """Status and text; status 0 while nobody listens."""
    try:
        async with aiohttp.ClientSession() as session, session.post(url + path, json=body) as reply:
            return reply.status, await reply.text()
    except aiohttp.ClientError:
        return 0, ""


def commands(pair: Pair) -> dict[str, tuple[list[str], int]]:
    """Name of a router -> its command line and port."""
    pools = ["--pd-disaggregation", "--prefill", pair.sides[PREFILL].url, str(pair.bootstrap_port)]
    pools += ["--decode", pair.sides[DECODE].url, "--host", "127.0.0.1"]
    port = free_port()
    ours = [sys.executable, "-m", "sglang_lite", "router", *pools, "--port", str(port)]
    rust = [str(RUST), "launch", *pools, "--port", str(port), "--prometheus-port", str(free_port())]
    return {"ours": (ours, port), "rust": ([*rust, "--worker-startup-check-interval", "1"], port)}


@pytest.mark.parametrize(
    "name",
    [
        "ours",
        pytest.param(
            "rust",
            marks=pytest.mark.skipif(
                RUST is None, reason="no sglang-router: .ci/run installs it; SGLANG_ROUTER names it"
            ),
        ),
    ],
)
async def test_a_router_in_front_of_the_pair(pair: Pair, tmp_path: Path, name: str) -> None:
    command, port = commands(pair)[name]
    async with running(command, port, tmp_path / "log") as url:
        before = (await pair.loads(DECODE))["disaggregation"]["transfers"]
        status, text = await ask(url, "/v1/chat/completions", CHAT)
        assert status == 200
        assert json.loads(text)["choices"][0]["message"]["content"] == "BCDABC"
        status, text = await ask(url, "/v1/chat/completions", {**CHAT, "stream": True})
        events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        pieces = [choice["delta"].get("content") or "" for event in events for choice in event["choices"]]
        assert "".join(pieces) == "BCDABC"
        assert text.rstrip().endswith("data: [DONE]")
        sampling = {"max_new_tokens": 5, "temperature": 0}
        status, text = await ask(url, "/generate", {"text": "A", "sampling_params": sampling})
        assert (status, json.loads(text)["text"]) == (200, "BCDAB")
        status, text = await ask(
            url, "/v1/completions", {"model": "chain", "prompt": ["A", "p"], "max_tokens": 3, "temperature": 0}
        )
        assert status == 200, text
        assert [choice["text"] for choice in json.loads(text)["choices"]] == ["BCD", "qXXr"]
        await pair.settled()
        after = (await pair.loads(DECODE))["disaggregation"]["transfers"]
        assert after - before == 5
