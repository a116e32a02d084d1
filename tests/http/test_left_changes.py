"""Changes that callers leave in the middle, or that cross: front and engine go on agreeing about what is there."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.support.chain_model import build_chain_model
from tests.support.server import LocalServer, greedy, local_server
from tests.support.tiny_adapters import write_adapter

TWO = {"max_new_tokens": 2, "ignore_eos": True}


async def hang_up(server: LocalServer, path: str, body: dict[str, Any]) -> None:
    """Send a call whole and close the connection as soon as the server works on it."""
    host, port = server.url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    await asyncio.sleep(0.002)
    writer.transport.abort()


async def until(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not await condition():
            await asyncio.sleep(0.01)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def plain(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalServer]:
    model = build_chain_model(tmp_path_factory.mktemp("served"))
    async with local_server(model, page_size=1, max_total_tokens=4096) as started:
        yield started


async def test_weights(plain: LocalServer, tmp_path: Path) -> None:
    other = build_chain_model(tmp_path, overrides={ord("A"): ord("Z")})
    await hang_up(plain, "/update_weights_from_disk", {"model_path": str(other), "weight_version": "v9"})

    async def served() -> bool:
        return bool((await plain.generate("A", sampling=TWO))["text"][0] == "Z")

    async def shown() -> bool:
        info = (await plain.get("/model_info")).json()
        return (info["model_path"], info["weight_version"]) == (str(other), "v9")

    await until(served)
    await until(shown)
    assert (await plain.get("/get_weights_by_name?name=model.norm.weight")).status == 200


async def test_pauses(plain: LocalServer) -> None:
    for path, status in (("/pause_generation", 503), ("/continue_generation", 200)):
        await hang_up(plain, path, {})

        async def as_wanted(status: int = status) -> bool:
            return (await plain.get("/ready")).status == status

        await until(as_wanted)
        refused = (await plain.post("/generate", greedy("A", TWO))).status == 412
        assert refused == (status == 503)


async def test_pauses_that_cross(plain: LocalServer) -> None:
    """Whichever of the two the engine hears last, the front tells the same of it."""
    for first, second in (("/continue_generation", "/pause_generation"), ("/pause_generation", "/continue_generation")):
        for _ in range(10):
            await asyncio.gather(*(plain.post(path, {}) for path in (first, second)))
            ready = (await plain.get("/ready")).status
            async with asyncio.timeout(10):
                served = (await plain.post("/generate", greedy("A", TWO))).status
            assert (ready, served) in ((200, 200), (503, 412))
    assert (await plain.post("/continue_generation", {})).status == 200


async def test_adapters(chain_model: Path, tmp_path: Path) -> None:
    one = write_adapter(tmp_path / "one", chain_model, seed=5)
    names: dict[str, Any] = {"lora_name": "one", "lora_path": str(one)}
    options: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 4, "lora_target_modules": ["all"]}
    async with local_server(chain_model, max_total_tokens=4096, max_loras_per_batch=1, **options) as server:

        async def is_listed() -> bool:
            return any(model["id"] == "one" for model in (await server.get("/v1/models")).json()["data"])

        async def is_loaded_again() -> bool:
            return (await server.post("/load_lora_adapter", names)).status == 200

        base = (await server.generate("A", sampling=TWO))["output_ids"]
        await hang_up(server, "/load_lora_adapter", names)
        await until(is_listed)
        assert (await server.generate("A", sampling=TWO, lora_path="one"))["output_ids"] != base
        await hang_up(server, "/unload_lora_adapter", names)
        await until(is_loaded_again)
        assert (await server.generate("A", sampling=TWO, lora_path="one"))["output_ids"] != base
