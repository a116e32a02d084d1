"""Vertex AI's predictions: the texts of /generate, one for each instance."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_lite.server.app import make_app
from sglang_lite.server.context import ServerContext
from sglang_lite.types import StartupError
from tests.support.fake_engine import FakeEngine
from tests.support.server import LocalServer
from tests.unit.server.test_routes import serving

PARAMETERS = {"sampling_params": {"max_new_tokens": 3, "temperature": 0}}


@pytest.mark.parametrize(
    "instances", [[{"text": "A"}, {"text": "pA"}], [{"input_ids": [65]}, {"input_ids": [112, 65]}]]
)
async def test_every_instance_has_a_prediction(server: LocalServer, instances: list[dict[str, Any]]) -> None:
    reply = await server.post("/vertex_generate", {"instances": instances, "parameters": PARAMETERS})
    assert reply.status == 200
    predictions = reply.json()["predictions"]
    assert [item["text"] for item in predictions] == ["BCD", "BCD"]
    assert [item["meta_info"]["prompt_tokens"] for item in predictions] == [1, 2]


async def test_no_instances_have_no_predictions(server: LocalServer) -> None:
    reply = await server.post("/vertex_generate", {"instances": []})
    assert (reply.status, reply.json()) == (200, [])
    one = await server.post("/vertex_generate", {"instances": [{"text": "G"}], "parameters": PARAMETERS})
    assert [item["text"] for item in one.json()["predictions"]] == ["g"]


async def test_predictions_can_be_streamed(server: LocalServer) -> None:
    body = {"instances": [{"text": "A"}], "parameters": {**PARAMETERS, "stream": True}}
    events = (await server.post("/vertex_generate", body)).events
    assert (events[-2]["text"], events[-2]["index"], events[-1]) == ("BCD", 0, "[DONE]")


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"instances": {}},
        {"instances": ["A"]},
        {"instances": [{}]},
        {"instances": [{"text": "A"}, {"input_ids": [1]}]},
        {"instances": [{"text": "A", "image_data": "x"}]},
        {"instances": [{"text": "A"}], "parameters": []},
        {"instances": [{"text": "A"}], "parameters": {"text": "B"}},
        {"instances": [{"text": "A"}], "parameters": {"sampling_params": {"bogus": 1}}},
    ],
)
async def test_bad_predictions(server: LocalServer, body: dict[str, Any]) -> None:
    assert (await server.post("/vertex_generate", body)).status == 400


async def test_the_platform_chooses_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIP_PREDICT_ROUTE", "/v1/endpoints/7:predict")
    async with serving(FakeEngine(api_key="key")) as (client, _):
        body = {"instances": [{"input_ids": [1]}]}
        assert (await client.post("/v1/endpoints/7:predict", json=body)).status == 401
        headers = {"Authorization": "Bearer key"}
        assert (await client.post("/v1/endpoints/7:predict", json=body, headers=headers)).status == 200
        assert (await client.post("/vertex_generate", json=body, headers=headers)).status == 404


@pytest.mark.parametrize("path", ["predict", "/generate", "/{x}"])
async def test_paths_that_cannot_be(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.setenv("AIP_PREDICT_ROUTE", path)
    with pytest.raises(StartupError, match="AIP_PREDICT_ROUTE"):
        make_app(ServerContext(FakeEngine()))  # type: ignore[arg-type]
