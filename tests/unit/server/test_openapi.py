"""The OpenAPI document and the types behind it: what it says of a field is what a route accepts."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from sglang_lite.server.definitions.anthropic import MessagesBody
from sglang_lite.server.definitions.base import parse_body
from sglang_lite.server.definitions.pooling import ScoreBody
from sglang_lite.server.openapi_routes import BODIES
from sglang_lite.types import RequestError
from tests.support.fake_engine import FakeEngine
from tests.unit.server.test_routes import serving

MINIMAL: dict[str, dict[str, Any]] = {
    "/generate": {"input_ids": [1]},
    "/encode": {"input_ids": [1]},
    "/v1/completions": {"prompt": [1]},
    "/v1/chat/completions": {"input_ids": [1]},
    "/v1/responses": {"input": "x"},
    "/v1/embeddings": {"input": [1]},
    "/v1/score": {"query": [1], "items": [[1]], "label_token_ids": [1]},
    "/v1/rerank": {"query": "q", "documents": ["d"]},
    "/v1/messages": {"model": "fake", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1},
}


async def document(labels: tuple[str, ...] = (), **options: Any) -> dict[str, Any]:
    engine = FakeEngine(**options)
    engine.description.labels = labels
    async with serving(engine) as (client, _):
        response = await client.get("/openapi.json")
        assert response.status == 200
        return msgspec.json.decode(await response.read(), type=dict[str, Any])


async def test_every_typed_route_is_in_the_document() -> None:
    found = await document(labels=("yes", "no"))
    assert found["openapi"].startswith("3.1")
    for path, kind in BODIES.items():
        schema = found["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        name = schema["$ref"].rpartition("/")[2]
        assert name == kind.__name__
        assert set(found["components"]["schemas"][name]["properties"]) == set(kind.__struct_fields__)
    references = str(found["paths"]) + str(found["components"])
    for part in references.split("#/components/schemas/")[1:]:
        assert part.split("'")[0] in found["components"]["schemas"]


async def test_routes_without_a_function_are_left_out() -> None:
    found = await document()
    assert not {"/v1/classify", "/classify", "/api/chat", "/v1/responses/{response}"} & set(found["paths"])
    assert {"/health", "/v1/models"} <= set(found["paths"])
    assert found["paths"]["/flush_cache"]["post"]["tags"] == ["administration"]
    assert "get" in (await document(enable_response_store=True))["paths"]["/v1/responses/{response}"]


@pytest.mark.parametrize("path", list(MINIMAL))
async def test_a_field_of_another_type_is_refused_where_the_document_says_so(path: str) -> None:
    """Every field that the type restricts: an object is none of the types that any of them has."""
    async with serving(FakeEngine()) as (client, _):
        for name in BODIES[path].__struct_fields__:
            wrong = {**MINIMAL[path], name: {"nested": {"x": [None]}}}
            try:
                parse_body(wrong, BODIES[path])
            except RequestError:
                response = await client.post(path, json=wrong)
                assert response.status == 400, (name, await response.text())


@pytest.mark.parametrize(
    ("kind", "body", "message"),
    [
        (ScoreBody, {"query": "a", "items": "b"}, "label_token_ids is required"),
        (ScoreBody, {"query": "a", "items": "b", "label_token_ids": [1, "x"]}, "label_token_ids[1]"),
        (MessagesBody, {"model": "m", "messages": [{"role": "user"}], "max_tokens": 1}, "messages[0].content"),
        (MessagesBody, {"model": "m", "messages": [], "max_tokens": 0}, "max_tokens"),
    ],
)
def test_errors_name_the_field(kind: Any, body: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_body(body, kind)
    assert message in caught.value.message
    assert caught.value.field
