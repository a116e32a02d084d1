"""Weights that are replaced while the server runs, and the profile of its steps (acceptance C615, C617, C618, C621)."""

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
from tests.support.smoke_model import build_smoke_model

UPDATE, VERSION, VALUES = "/update_weights_from_disk", "/update_weight_version", "/get_weights_by_name"


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def changing(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalServer]:
    """A server whose weights these tests replace; its checkpoint is theirs alone."""
    model = build_chain_model(tmp_path_factory.mktemp("served"))
    async with local_server(model, page_size=1, max_total_tokens=4096, enable_metrics=True) as started:
        yield started


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The chain model with ``A`` -> ``Z`` -> end."""
    return build_chain_model(tmp_path_factory.mktemp("other"), overrides={ord("A"): ord("Z")})


async def test_new_weights_answer_the_next_request(changing: LocalServer, other_model: Path) -> None:
    """C615"""
    served = (await changing.get("/model_info")).json()["model_path"]
    first = await changing.generate("a prefix A", sampling={"max_new_tokens": 2})
    assert first["text"] == "BC"
    reply = await changing.post(UPDATE, {"model_path": str(other_model), "weight_version": "v2"})
    assert (reply.status, reply.json()["success"], reply.json()["num_paused_requests"]) == (200, True, 0), reply.text
    second = await changing.generate("a prefix A", sampling={"max_new_tokens": 2})
    assert second["text"] == "Z"
    assert (second["meta_info"]["cached_tokens"], second["meta_info"]["weight_version"]) == (0, "v2")
    info = (await changing.get("/model_info")).json()
    assert (info["model_path"], info["weight_version"]) == (str(other_model), "v2")
    # And back, keeping the version that is not given.
    assert (await changing.post(UPDATE, {"model_path": served, "load_format": "safetensors"})).status == 200
    third = await changing.generate("a prefix A", sampling={"max_new_tokens": 2})
    assert (third["text"], third["meta_info"]["cached_tokens"]) == ("BC", 0)
    assert third["meta_info"]["weight_version"] == "v2"


async def test_requests_that_come_while_weights_are_loaded_wait(changing: LocalServer, other_model: Path) -> None:
    served = (await changing.get("/model_info")).json()["model_path"]
    update = asyncio.create_task(changing.post(UPDATE, {"model_path": str(other_model)}))
    while not update.done():
        reply = await changing.post("/generate", greedy("A", {"max_new_tokens": 3}))
        assert reply.json()["text"] in ("BCD", "Z")
    if (await update).status == 200:
        assert (await changing.generate("A", sampling={"max_new_tokens": 3}))["text"] == "Z"
    else:  # one of the requests was there first
        assert "busy" in (await update).text
    await changing.idle()
    assert (await changing.post(UPDATE, {"model_path": served})).status == 200


async def test_running_requests_are_in_the_way(changing: LocalServer, other_model: Path) -> None:
    served = (await changing.get("/model_info")).json()["model_path"]
    task = asyncio.create_task(changing.post("/generate", greedy("A", {"max_new_tokens": 1000, "ignore_eos": True})))
    while (await changing.load())["num_reqs"] == 0:
        await asyncio.sleep(0)
    refused = await changing.post(UPDATE, {"model_path": str(other_model)})
    assert (refused.status, refused.json()["success"]) == (400, False)
    assert "busy" in refused.json()["message"]
    assert (await changing.get("/model_info")).json()["model_path"] == served
    forced = await changing.post(UPDATE, {"model_path": str(other_model), "abort_all_requests": True})
    assert forced.status == 200, forced.text
    assert (await task).json()["meta_info"]["finish_reason"]["type"] == "abort"
    assert (await changing.generate("A", sampling={"max_new_tokens": 3}))["text"] == "Z"
    assert (await changing.post(UPDATE, {"model_path": served})).status == 200


async def test_a_pause_outlasts_new_weights(changing: LocalServer, other_model: Path) -> None:
    served = (await changing.get("/model_info")).json()["model_path"]
    assert (await changing.post("/pause_generation", {"mode": "in_place"})).status == 200
    assert (await changing.post(UPDATE, {"model_path": str(other_model)})).status == 200
    assert (await changing.load())["num_reqs"] == 0
    assert (await changing.post("/generate", greedy("A"))).status == 412
    assert (await changing.post("/continue_generation", {})).status == 200
    assert (await changing.generate("A", sampling={"max_new_tokens": 1}))["text"] == "Z"
    assert (await changing.post(UPDATE, {"model_path": served})).status == 200


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({}, "model_path"),
        ({"model_path": ""}, "model_path"),
        ({"model_path": 5}, "model_path"),
        ({"model_path": "/no/such/directory"}, "/no/such/directory"),
        ({"model_path": "https://example.com/model"}, "directory"),
        ({"model_path": "x" * 70_000}, "directory"),
        ({"model_path": "a\0b"}, "directory"),
        ({"model_path": "SMOKE"}, "another model"),
        ({"model_path": "EMPTY"}, "config.json"),
        ({"model_path": "CUT"}, "safetensors"),
        ({"model_path": "SMOKE", "load_format": "pt"}, "load_format"),
        ({"model_path": "SMOKE", "flush_cache": False}, "flush_cache"),
        ({"model_path": "SMOKE", "weight_version": " "}, "weight_version"),
        ({"model_path": "SMOKE", "weight_version": 7}, "weight_version"),
    ],
)
async def test_weights_that_cannot_be_served(
    changing: LocalServer, tmp_path: Path, body: dict[str, Any], named: str
) -> None:
    """C615: what was served stays, and goes on serving."""
    directories = {"SMOKE": build_smoke_model(tmp_path / "smoke"), "EMPTY": tmp_path / "empty"}
    directories["EMPTY"].mkdir()
    directories["CUT"] = build_chain_model(tmp_path / "cut")
    weights = directories["CUT"] / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    path = body.get("model_path")
    if path in directories:
        body = {**body, "model_path": str(directories[path])}
    reply = await changing.post(UPDATE, body)
    assert (reply.status, reply.json()["success"]) == (400, False)
    assert named in reply.json()["message"], reply.text
    assert (await changing.generate("A", sampling={"max_new_tokens": 3}))["text"] == "BCD"


async def test_weight_version(changing: LocalServer) -> None:
    """C621"""
    reply = await changing.post(VERSION, {"new_version": "v3"})
    assert (reply.status, reply.json()["success"], reply.json()["new_version"]) == (200, True, "v3")
    assert (await changing.get("/model_info")).json()["weight_version"] == "v3"
    assert (await changing.get("/server_info")).json()["weight_version"] == "v3"
    assert (await changing.generate("G"))["meta_info"]["weight_version"] == "v3"
    for wrong in ({"new_version": ""}, {}, {"new_version": 5}, {"new_version": "x" * 1000}):
        refused = await changing.post(VERSION, wrong)
        assert (refused.status, refused.json()["success"]) == (400, False)
    assert (await changing.get("/model_info")).json()["weight_version"] == "v3"


async def test_values_of_weights(changing: LocalServer) -> None:
    """C617"""
    body = {"name": "model.norm.weight", "truncate_size": 3}
    reply = await changing.post(VALUES, body)
    assert (reply.status, reply.json()) == (200, [0.25, 0.25, 0.25])
    assert (await changing.get(f"{VALUES}?name=model.norm.weight&truncate_size=3")).json() == [0.25, 0.25, 0.25]
    assert len((await changing.post(VALUES, {"name": "model.norm.weight"})).json()) == 100
    embedding = (await changing.post(VALUES, {"name": "model.embed_tokens.weight", "truncate_size": 2})).json()
    assert (len(embedding), len(embedding[0]), embedding[1][:3]) == (2, 512, [0.0, 1.0, 0.0])
    for wrong in ({"name": "model.nothing"}, {"name": ""}, {}, {"name": 5}, {**body, "truncate_size": 0}):
        assert (await changing.post(VALUES, wrong)).status == 400


async def test_values_of_files_that_changed_are_refused(changing: LocalServer) -> None:
    path = Path((await changing.get("/model_info")).json()["model_path"])
    build_chain_model(path, overrides={ord("A"): ord("Z")})
    reply = await changing.post(VALUES, {"name": "model.norm.weight"})
    assert (reply.status, "changed" in reply.text) == (400, True)
    build_chain_model(path)
    assert (await changing.post(UPDATE, {"model_path": str(path)})).status == 200
    assert (await changing.post(VALUES, {"name": "model.norm.weight"})).status == 200


async def test_profile(changing: LocalServer, tmp_path: Path) -> None:
    """C618"""
    assert (await changing.post("/stop_profile")).status == 412
    assert (await changing.post("/start_profile", {"output_dir": str(tmp_path)})).status == 200
    assert (await changing.get("/start_profile")).status == 409
    await changing.generate("A", sampling={"max_new_tokens": 5})
    assert (await changing.post("/stop_profile")).status == 200
    assert (await changing.get("/stop_profile")).status == 412
    (file,) = tmp_path.glob("sglang-profile-*-*.json")
    trace = json.loads(file.read_text())
    names = {event.get("name", "") for event in trace["traceEvents"]}
    # Which product a layer takes is measured, so its name differs from machine to machine; the softmax does not.
    assert any("softmax" in name for name in names), sorted(names)
    about = trace["profile"]
    assert about["duration_ms"] == about["stopped_unix_ms"] - about["started_unix_ms"] >= 0
    assert file.name == f"sglang-profile-{about['started_unix_ms']}-{about['stopped_unix_ms']}.json"


async def test_profile_of_so_many_steps_ends_by_itself(changing: LocalServer, tmp_path: Path) -> None:
    assert (await changing.post("/start_profile", {"output_dir": str(tmp_path), "num_steps": 2})).status == 200
    await changing.generate("A", sampling={"max_new_tokens": 5})
    assert len(list(tmp_path.glob("sglang-profile-*.json"))) == 1
    assert (await changing.post("/stop_profile")).status == 412


@pytest.mark.parametrize(
    "body",
    [
        {"output_dir": ""},
        {"output_dir": 5},
        {"output_dir": "/proc/nothing/here"},
        {"num_steps": 0},
        {"activities": ["RPD"]},
        {"profile_prefix": "../x"},
        {"profile_by_stage": True},
        [],
    ],
)
async def test_profiles_that_cannot_be_made(changing: LocalServer, body: Any) -> None:
    """C618"""
    assert (await changing.post("/start_profile", body)).status == 400
    assert (await changing.post("/stop_profile")).status == 412
