"""Memory that an idle server gives back and takes again, and options that change while it runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from sglang_lite import startup
from sglang_lite.config import ServerConfig
from sglang_lite.types import StartupError
from tests.support.chain_model import build_chain_model
from tests.support.server import LocalServer, greedy, local_server

RELEASE, RESUME = "/release_memory_occupation", "/resume_memory_occupation"
UPDATE, STATE = "/update_weights_from_disk", "/set_internal_state"


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def saving(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalServer]:
    model = build_chain_model(tmp_path_factory.mktemp("saving"))
    async with local_server(
        model, page_size=16, max_total_tokens=65536, enable_memory_saver=True, enable_metrics=True
    ) as started:
        yield started


def resident(server: LocalServer) -> int:
    """Bytes of memory that the engine core has."""
    status = Path(f"/proc/{server.engine.info.process_id}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


async def fill(server: LocalServer) -> None:
    """Write some tens of MiB of the pool."""
    prompts = [[token, *[66] * 999] for token in range(40)]
    reply = await server.post("/generate", {"input_ids": prompts, "sampling_params": {"max_new_tokens": 1}})
    assert reply.status == 200


@pytest.mark.parametrize("tags", [None, [], ["kv_cache"], ["weights"], ["weights", "kv_cache"]])
async def test_memory_goes_and_comes_back(saving: LocalServer, tags: list[str] | None) -> None:
    body = {} if tags is None else {"tags": tags}
    await fill(saving)
    full = resident(saving)
    reply = await saving.post(RELEASE, body)
    assert (reply.status, reply.json()) == (200, None)
    if tags != ["weights"]:
        assert full - resident(saving) > 24 * 2**20
    refused = await saving.post("/generate", greedy("A"))
    assert refused.status == 412 and RESUME in refused.text
    assert (await saving.get("/health")).status == 200
    assert (await saving.post(RELEASE, body)).status == 200  # there is nothing left to do
    reply = await saving.call("GET", RESUME) if tags is None else await saving.post(RESUME, body)
    assert (reply.status, reply.json()) == (200, None)
    result = await saving.generate("pA", sampling={"max_new_tokens": 3})
    assert (result["text"], result["meta_info"]["cached_tokens"]) == ("BCD", 0)


async def test_parts_come_back_one_by_one(saving: LocalServer) -> None:
    assert (await saving.post(RELEASE, {"tags": ["weights", "kv_cache"]})).status == 200
    assert (await saving.post(RESUME, {"tags": ["weights"]})).status == 200
    assert "kv_cache" in (await saving.post("/generate", greedy("A"))).text
    assert (await saving.post(RESUME, {"tags": ["kv_cache"]})).status == 200
    assert (await saving.generate("A", sampling={"max_new_tokens": 2}))["text"] == "BC"
    assert (await saving.post(RESUME)).status == 200


async def test_running_requests_are_in_the_way(saving: LocalServer) -> None:
    task = asyncio.create_task(saving.post("/generate", greedy("A", {"max_new_tokens": 900}, rid="long")))
    async with asyncio.timeout(20):
        while (await saving.load())["num_reqs"] == 0:
            await asyncio.sleep(0.005)
    reply = await saving.post(RELEASE)
    assert reply.status == 400 and "busy with 1 requests" in reply.text
    assert len((await task).json()["output_ids"]) == 900
    assert (await saving.generate("A", sampling={"max_new_tokens": 2}))["text"] == "BC"


async def test_a_paused_engine_keeps_its_requests_over_a_release(saving: LocalServer) -> None:
    """As trainers do it: retract, release, resume, continue."""
    task = asyncio.create_task(saving.post("/generate", greedy("A", {"max_new_tokens": 900}, rid="kept")))
    async with asyncio.timeout(20):
        while (await saving.load())["num_reqs"] == 0:
            await asyncio.sleep(0.005)
    assert (await saving.post("/pause_generation", {"mode": "retract"})).status == 200
    assert (await saving.post(RELEASE)).status == 200
    assert (await saving.post(RESUME)).status == 200
    assert not task.done()  # the pause still holds
    assert (await saving.post("/continue_generation", {})).status == 200
    result = (await task).json()
    assert result["text"] == ("BCDA" * 225) and result["meta_info"]["num_retractions"] == 1


async def test_weights_come_back_from_where_they_are_now(saving: LocalServer, tmp_path: Path) -> None:
    served = (await saving.get("/model_info")).json()["model_path"]
    other = build_chain_model(tmp_path / "other", overrides={ord("A"): ord("Z")})
    assert (await saving.post(UPDATE, {"model_path": str(other)})).status == 200
    assert (await saving.post(RELEASE, {"tags": ["weights"]})).status == 200
    update = await saving.post(UPDATE, {"model_path": served})
    assert update.status == 400 and "the weights are released" in update.text
    # A checkpoint that is gone meanwhile leaves the server without weights, and says so.
    (other / "config.json").rename(other / "config.away")
    gone = await saving.post(RESUME)
    assert gone.status == 503 and "config.json" in gone.text
    assert (await saving.post("/generate", greedy("A"))).status == 412
    (other / "config.away").rename(other / "config.json")
    assert (await saving.post(RESUME)).status == 200
    assert (await saving.generate("A", sampling={"max_new_tokens": 1}))["text"] == "Z"
    assert (await saving.post(UPDATE, {"model_path": served})).status == 200


async def test_weights_can_be_replaced_before_the_pool_is_back(saving: LocalServer, tmp_path: Path) -> None:
    """As trainers wake a server: weights, new ones, and then the memory for requests."""
    served = (await saving.get("/model_info")).json()["model_path"]
    other = build_chain_model(tmp_path / "other", overrides={ord("A"): ord("Y")})
    await saving.generate("a prefix A", sampling={"max_new_tokens": 2})
    assert (await saving.post(RELEASE)).status == 200
    assert (await saving.post(RESUME, {"tags": ["weights"]})).status == 200
    assert (await saving.post(UPDATE, {"model_path": str(other)})).status == 200
    assert (await saving.post("/generate", greedy("A"))).status == 412
    assert (await saving.post(RESUME, {"tags": ["kv_cache"]})).status == 200
    result = await saving.generate("a prefix A", sampling={"max_new_tokens": 1})
    assert (result["text"], result["meta_info"]["cached_tokens"]) == ("Y", 0)
    assert (await saving.post(UPDATE, {"model_path": served})).status == 200


async def test_every_replica_gives_its_memory_back(chain_model: Path) -> None:
    options = {"page_size": 16, "max_total_tokens": 4096, "dp_size": 2}
    async with local_server(chain_model, enable_memory_saver=True, **options) as replicas:
        bodies = [greedy("pA", {"max_new_tokens": 3}, routed_dp_rank=rank) for rank in (0, 1)]
        assert (await replicas.post(RELEASE)).status == 200
        assert (await replicas.post("/generate", bodies[0])).status == 412
        assert (await replicas.post(RESUME)).status == 200
        assert [(await replicas.post("/generate", body)).json()["text"] for body in bodies] == ["BCD", "BCD"]


@pytest.mark.parametrize("tags", ["kv_cache", ["cuda_graph"], [1], [["weights"]]])
async def test_unknown_kinds_of_memory(saving: LocalServer, tags: Any) -> None:
    for path in (RELEASE, RESUME):
        reply = await saving.post(path, {"tags": tags})
        assert reply.status == 400 and "tags" in reply.text
    assert (await saving.generate("A", sampling={"max_new_tokens": 2}))["text"] == "BC"


async def test_other_servers_keep_their_memory(server: LocalServer) -> None:
    reply = await server.post(RELEASE)
    assert reply.status == 501 and "--enable-memory-saver" in reply.text
    assert (await server.post(RESUME)).status == 501


@pytest.mark.parametrize(
    "options", [{"enable_lora": True, "max_lora_rank": 4}, {"tp_size": 2}, {"speculative_algorithm": "NEXTN"}]
)
def test_servers_that_cannot_give_memory_back_do_not_start(options: dict[str, Any]) -> None:
    with pytest.raises(StartupError, match="--enable-memory-saver"):
        startup.check_options(ServerConfig(model_path="m", device="cpu", enable_memory_saver=True, **options))


async def test_some_options_change_while_the_server_runs(saving: LocalServer) -> None:
    body = greedy("A", {"max_new_tokens": 8}, stream=True)
    before = (await saving.post("/generate", body)).events
    changes = {"stream_interval": 4, "incremental_streaming_output": True, "max_concurrent_requests": 3}
    old = {name: (await saving.get("/server_info")).json()[name] for name in changes}
    reply = await saving.call("PUT", STATE, {"server_args": changes})
    assert (reply.status, reply.json()) == (200, [True])
    info = (await saving.get("/server_info")).json()
    assert {name: info[name] for name in changes} == changes
    after = (await saving.post("/generate", body)).events
    counts = [event["meta_info"]["completion_tokens"] for event in after[:-1]]
    assert counts == sorted(counts) and counts[-1] == 8 > len(counts), counts
    assert "".join(event["text"] for event in after[:-1]) == "BCDABCDA" == before[-2]["text"]
    assert (await saving.post(STATE, {"server_args": old})).status == 200
    assert (await saving.post("/generate", body)).events[-2]["text"] == "BCDABCDA"


@pytest.mark.parametrize(
    "arguments",
    [
        {"page_size": 4},
        {"stream_interval": 0},
        {"stream_interval": "2"},
        {"incremental_streaming_output": 1},
        {"stream_interval": 2, "model_path": "x"},
    ],
)
async def test_other_options_do_not(saving: LocalServer, arguments: dict[str, Any]) -> None:
    before = (await saving.get("/server_info")).json()["stream_interval"]
    reply = await saving.post(STATE, {"server_args": arguments})
    assert reply.status == 400
    assert (await saving.get("/server_info")).json()["stream_interval"] == before


async def test_these_routes_need_the_administrator(uncached_server: LocalServer) -> None:
    for path in (RELEASE, RESUME, STATE):
        assert (await uncached_server.post(path, {})).status == 401
