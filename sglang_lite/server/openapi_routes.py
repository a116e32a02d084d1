"""``GET /openapi.json``: the routes of the application, their bodies made from the types that validate them."""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

import sglang_lite
from sglang_lite.server.absent_routes import ADMINISTRATION, absent
from sglang_lite.server.context import context_of
from sglang_lite.server.definitions.anthropic import CountTokensBody, MessagesBody
from sglang_lite.server.definitions.base import RequestBody
from sglang_lite.server.definitions.native import (
    CloseSessionBody,
    DetokenizeBody,
    GenerateBody,
    InternalStateBody,
    OpenSessionBody,
    TokenizeBody,
    VertexBody,
)
from sglang_lite.server.definitions.openai import ChatBody, CompletionBody
from sglang_lite.server.definitions.pooling import ClassifyBody, EmbeddingBody, EncodeBody, RerankBody, ScoreBody
from sglang_lite.server.definitions.responses import ResponsesBody
from sglang_lite.server.errors import json_response
from sglang_lite.server.pooling_routes import classify, encode_scores

BODIES: dict[str, type[RequestBody]] = {
    "/generate": GenerateBody,
    "/vertex_generate": VertexBody,
    "/set_internal_state": InternalStateBody,
    "/open_session": OpenSessionBody,
    "/close_session": CloseSessionBody,
    "/encode": EncodeBody,
    "/classify": EncodeBody,
    "/v1/classify": ClassifyBody,
    "/tokenize": TokenizeBody,
    "/v1/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
    "/v1/detokenize": DetokenizeBody,
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
    "/invocations": ChatBody,
    "/v1/responses": ResponsesBody,
    "/v1/embeddings": EmbeddingBody,
    "/v1/score": ScoreBody,
    "/v1/rerank": RerankBody,
    "/rerank": RerankBody,
    "/v1/messages": MessagesBody,
    "/v1/messages/count_tokens": CountTokensBody,
}
"""The type of the body by path."""

OPERATOR_PATHS = frozenset(
    {
        "/abort_request",
        "/pause_generation",
        "/continue_generation",
        "/flush_cache",
        "/load_lora_adapter",
        "/unload_lora_adapter",
        "/release_memory_occupation",
        "/resume_memory_occupation",
        "/set_internal_state",
        *ADMINISTRATION,
    }
)
"""Routes that act on the whole server; they have the tag ``administration``."""

_REPLIES = {
    "200": {"description": "The result; with stream, events (text/event-stream)."},
    "400": {"description": "A field is wrong; the message names it."},
    "401": {"description": "The API key is missing or wrong."},
    "404": {"description": "There is no such thing."},
    "412": {"description": "Generation is paused."},
    "413": {"description": "The body is too large."},
    "429": {"description": "The queue is full."},
    "501": {"description": "This server or its model cannot do that."},
    "503": {"description": "The server does not serve now."},
}
_STORED = "/v1/responses/{response}"
_METHODS = ("GET", "POST", "PUT", "DELETE")


def make_document(app: web.Application, *, has_store: bool, has_classes: bool = False) -> dict[str, Any]:
    """The OpenAPI 3.1 document of the routes of ``app``; those that only say what is absent are left out.

    Args:
        has_store: responses can be looked up; has_classes: the model classifies.
    """
    kinds = sorted(set(BODIES.values()), key=lambda kind: kind.__name__)
    _, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    paths: dict[str, dict[str, Any]] = {}
    for route in app.router.routes():
        path = route.resource.canonical if route.resource is not None else ""
        is_served = route.handler is not absent and (has_store or not path.startswith(_STORED))
        is_served &= has_classes or route.handler not in (classify, encode_scores)
        if route.method in _METHODS and path and is_served:
            paths.setdefault(path, {})[route.method.lower()] = _operation(route.method, path, route.handler.__doc__)
    return {
        "openapi": "3.1.0",
        "info": {"title": "sglang-lite", "version": sglang_lite.__version__},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}],
    }


def _operation(method: str, path: str, documentation: str | None) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": f"{method.lower()}{path}".replace("/", "_").replace("{", "").replace("}", ""),
        "summary": (documentation or path).strip().splitlines()[0],
        "tags": ["administration" if path in OPERATOR_PATHS else "inference" if path in BODIES else "information"],
        "responses": _REPLIES,
    }
    names = [part[1:-1].split(":")[0] for part in path.split("/") if part.startswith("{")]
    if names:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    body = BODIES.get(path)
    if body is not None and method != "GET":
        schema = {"$ref": f"#/components/schemas/{body.__name__}"}
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return operation


async def openapi(request: web.Request) -> web.Response:
    """The routes of this server and the bodies they take, as an OpenAPI document."""
    context = context_of(request)
    has_store, has_classes = context.config.enable_response_store, bool(context.engine.description.labels)
    return json_response(make_document(request.app, has_store=has_store, has_classes=has_classes))


def add_openapi_routes(app: web.Application) -> None:
    """Register the route of this module."""
    app.router.add_get("/openapi.json", openapi)
