"""Endpoints that are not built say so, in the words of their API."""

from __future__ import annotations

import pytest

from tests.support.fake_engine import FakeEngine
from tests.unit.server.test_routes import serving


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/api/chat"),
        ("GET", "/api/tags"),
        ("POST", "/release_memory_occupation"),
    ],
)
async def test_absent_endpoints_are_501(method: str, path: str) -> None:
    async with serving(FakeEngine()) as (client, _):
        response = await client.request(method, path, json={"input": "x"})
        body = await response.json()
    assert response.status == 501
    assert path in (body["message"] if "message" in body else body["error"]["message"])


async def test_absent_operator_endpoints_need_the_admin_key() -> None:
    async with serving(FakeEngine(admin_api_key="root")) as (client, _):
        assert (await client.post("/update_weights_from_disk", json={})).status == 401
        assert (await client.post("/api/chat", json={})).status == 501
