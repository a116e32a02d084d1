"""Low-rank adapters through the real routes: names in requests, loading, unloading while one is used."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.support.server import LocalServer, greedy, local_server
from tests.support.tiny_adapters import write_adapter

FOUR = {"max_new_tokens": 4, "ignore_eos": True}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def adapted(chain_model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalServer]:
    """The chain model with the adapter ``one`` and room for another."""
    one = write_adapter(tmp_path_factory.mktemp("adapters") / "one", chain_model, seed=5)
    options: dict[str, Any] = {"lora_paths": [f"one={one}"], "max_loras_per_batch": 2, "lora_target_modules": ["all"]}
    options["enable_metrics"] = True
    async with local_server(chain_model, max_total_tokens=8192, **options) as started:
        yield started


async def ids(server: LocalServer, **fields: Any) -> list[int]:
    result: list[int] = (await server.generate("A", sampling=FOUR, **fields))["output_ids"]
    return result


async def test_names_in_requests(adapted: LocalServer) -> None:
    base, one = await ids(adapted), await ids(adapted, lora_path="one")
    assert bytes(base) == b"BCDA"
    assert one != base
    batch = {"text": ["A", "A", "A"], "sampling_params": {**FOUR, "temperature": 0}, "lora_path": ["one", None, "one"]}
    reply = await adapted.post("/generate", batch)
    assert [item["output_ids"] for item in reply.json()] == [one, base, one]
    texts = []
    for fields in ({"model": "chain:one"}, {"lora_path": "one"}, {"model": "chain"}):
        body = {"prompt": "A", "max_tokens": 4, "temperature": 0, "ignore_eos": True, **fields}
        reply = await adapted.post("/v1/completions", body)
        assert reply.status == 200, reply.text
        texts.append(reply.json()["choices"][0]["text"])
    assert texts[0] == texts[1] != texts[2] == "BCDA"


async def test_places_in_the_load_report(adapted: LocalServer) -> None:
    load = (await adapted.get("/v1/loads?include=lora")).json()["loads"][0]
    assert load["lora"] == {"slots_used": 1, "slots_total": 2, "utilization": 0.5}
    text = (await adapted.get("/v1/loads?include=lora&format=prometheus")).text
    assert 'sglang_lora_slots_used{dp_rank="0"} 1\n' in text
    lines = (await adapted.get("/metrics")).text.splitlines()
    shown = {line.partition("{")[0]: line.rpartition(" ")[2] for line in lines if line.startswith("sglang:lora_pool")}
    assert shown == {
        "sglang:lora_pool_slots_used": "1.0",
        "sglang:lora_pool_slots_total": "2.0",
        "sglang:lora_pool_utilization": "0.5",
    }


@pytest.mark.parametrize(
    ("path", "body", "word"),
    [
        ("/generate", {"text": "A", "lora_path": "two"}, "adapter 'two' is not loaded; loaded adapters: one"),
        ("/generate", {"text": "A", "lora_path": 7}, "lora_path"),
        ("/generate", {"text": ["A", "B"], "lora_path": ["one"]}, "1 entries for 2 prompts"),
        ("/v1/completions", {"prompt": "A", "model": "chain:two"}, "adapter 'two' is not loaded"),
        ("/v1/completions", {"prompt": "A", "model": "other:one"}, "is not served here"),
        ("/load_lora_adapter", {"lora_name": "two"}, "lora_path"),
        ("/load_lora_adapter", {"lora_name": "a:b", "lora_path": "/x"}, "no ':'"),
        ("/load_lora_adapter", {"lora_name": "one", "lora_path": "/x"}, "already loaded"),
        ("/load_lora_adapter", {"lora_name": "two", "lora_path": "/nowhere"}, "no adapter_config.json in /nowhere"),
        ("/unload_lora_adapter", {"lora_name": "two"}, "not loaded"),
    ],
)
async def test_refusals(adapted: LocalServer, path: str, body: dict[str, Any], word: str) -> None:
    reply = await adapted.post(path, body)
    assert reply.status == 400, reply.text
    assert word in reply.text
    assert dict(adapted.engine.adapters.loaded).keys() == {"one"}


async def test_loading_and_unloading_while_in_use(adapted: LocalServer, chain_model: Path, tmp_path: Path) -> None:
    two = write_adapter(tmp_path / "two", chain_model, seed=6)
    reply = await adapted.post("/load_lora_adapter", {"lora_name": "two", "lora_path": str(two)})
    assert reply.status == 200
    assert reply.json()["success"] is True
    assert reply.json()["loaded_adapters"].keys() == {"one", "two"}
    cards = (await adapted.get("/v1/models")).json()["data"]
    assert [(card["id"], card["parent"], card["root"] == str(two)) for card in cards] == [
        ("chain", None, False),
        ("one", "chain", False),
        ("two", "chain", True),
    ]
    assert (await adapted.get("/v1/models/two")).json()["parent"] == "chain"
    expected = await ids(adapted, lora_path="two")
    assert expected not in (await ids(adapted), await ids(adapted, lora_path="one"))

    body = greedy("A", {"max_new_tokens": 600, "ignore_eos": True}, lora_path="two", stream=True, rid="long")
    async with adapted.session.post(adapted.url + "/generate", json=body) as stream:
        await stream.content.readuntil(b"\n\n")  # it runs
        unloading = asyncio.create_task(adapted.post("/unload_lora_adapter", {"lora_name": "two"}))
        while "two" in adapted.engine.adapters.loaded:
            await asyncio.sleep(0)
        refused = await adapted.post("/generate", greedy("A", FOUR, lora_path="two"))
        assert refused.status == 400
        assert await ids(adapted, lora_path="one"), "others go on"
        assert not unloading.done(), "a request uses the adapter"
        await adapted.post("/abort_request", {"rid": "long"})
        await stream.read()
    reply = await asyncio.wait_for(unloading, 10)
    assert reply.json() == {
        "success": True,
        "error_message": "",
        "loaded_adapters": {"one": adapted.engine.adapters.loaded["one"]},
    }
    reply = await adapted.post("/load_lora_adapter", {"lora_name": "three", "lora_path": str(two)})
    assert reply.status == 200, "its place is free again"
    assert await ids(adapted, lora_path="three") == expected
    assert (await adapted.post("/unload_lora_adapter", {"lora_name": "three"})).status == 200
