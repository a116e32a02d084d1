"""Endpoints that are not built say so, in the words of their API."""

from __future__ import annotations

import pytest

from tests.support.fake_engine import FakeEngine
from tests.unit.server.test_routes import serving


@pytest.mark.parametrize(
    ("method", "path", "instead"),
    [
        ("POST", "/api/chat", "/v1/chat/completions"),
        ("GET", "/api/tags", "/v1/models"),
        ("POST", "/v1/audio/transcriptions", "models for audio"),
        ("POST", "/update_weights_from_tensor", "/update_weights_from_disk"),
    ],
)
async def test_absent_endpoints_say_what_to_use_instead(method: str, path: str, instead: str) -> None:
    async with serving(FakeEngine()) as (client, _):
        response = await client.request(method, path, json={"input": "x"})
        body = await response.json()
    assert response.status == 501
    message = body["message"] if "message" in body else body["error"]["message"]
    assert path in message and instead in message


async def test_absent_operator_endpoints_need_the_admin_key() -> None:
    async with serving(FakeEngine(admin_api_key="root")) as (client, _):
        assert (await client.post("/update_weights_from_disk", json={})).status == 401
        assert (await client.post("/init_weights_update_group", json={})).status == 401
        assert (await client.post("/api/chat", json={})).status == 501
