"""``GET /v1/requests/{rid}``: where the time of a request went."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from aiohttp import web

from sglang_lite.frontend.request import GenerationOutput
from sglang_lite.frontend.request_ids import parse_request_id
from sglang_lite.observability.explain import explanation
from sglang_lite.server import fields
from sglang_lite.server.context import context_of
from sglang_lite.server.errors import json_response
from sglang_lite.types import RequestError

_SHOWN_PREFIXES = ("chatcmpl-", "cmpl-", "resp_", "msg_")
"""The OpenAI and Anthropic routes show ids with the prefix of their kind; the engine knows the client's own id."""


async def explain_request(request: web.Request) -> web.Response:
    """The sequences of one request, running or among the last that ended."""
    recent, now = context_of(request).recent, time.time()
    request_id = parse_request_id(request.match_info["rid"])
    found = recent.find(request_id, now)
    for prefix in _SHOWN_PREFIXES:
        if not found and request_id.startswith(prefix):
            found = recent.find(request_id.removeprefix(prefix), now)
    if not found:
        raise RequestError(
            f"no request {request_id[:80]!r} runs here or ended lately; send rid to choose the id", status=404
        )
    return json_response({"object": "request.explanation", "id": request_id, "sequences": found})


def wants_explanation(body: Mapping[str, Any]) -> bool:
    """Whether a request body asks for ``explain`` in its reply.

    Raises:
        RequestError: not a boolean.
    """
    return fields.boolean(body, "explain")


def explain_field(wanted: bool, outputs: Sequence[GenerationOutput]) -> dict[str, Any]:
    """What an OpenAI reply gets beside its other fields: one object a choice; nothing when it was not asked for."""
    if not wanted:
        return {}
    now = time.time()
    return {"explain": [explanation(output, now) for output in outputs]}


def add_explain_routes(app: web.Application) -> None:
    """Register the route of this module."""
    app.router.add_get("/v1/requests/{rid}", explain_request)
