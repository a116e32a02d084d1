"""``/open_session`` and ``/close_session``: conversations whose tokens the server keeps (see ``frontend.sessions``)."""

from __future__ import annotations

import math
from typing import Any

from aiohttp import web

from sglang_lite.frontend.fields import read_float
from sglang_lite.frontend.request_ids import parse_request_id
from sglang_lite.server import fields
from sglang_lite.server.bodies import read_object
from sglang_lite.server.context import context_of
from sglang_lite.server.errors import json_response
from sglang_lite.types import RequestError

_MOST_CHARACTERS = 2**53


def _timeout(body: dict[str, Any]) -> float | None:
    value = body.get("timeout")
    if value is None:
        return None
    seconds = read_float("timeout", value)
    if not (seconds > 0 and math.isfinite(seconds)):
        raise RequestError(f"timeout must be a number of seconds above 0, got {seconds}", field="timeout")
    return seconds


async def open_session(request: web.Request) -> web.Response:
    """Open a session; the reply is its id.

    ``capacity_of_str_len`` bounds the characters of an input with what it continues (0: no bound of its own).
    """
    context, body = context_of(request), await read_object(request)
    capacity = fields.integer(body, "capacity_of_str_len", minimum=0, maximum=_MOST_CHARACTERS)
    if capacity is None:
        raise RequestError("capacity_of_str_len is required", field="capacity_of_str_len")
    name = body.get("session_id")
    opened = context.sessions.open(
        None if name is None else parse_request_id(name, "session_id"),
        capacity=capacity,
        streaming=fields.boolean(body, "streaming"),
        timeout=_timeout(body),
    )
    return json_response(opened)


async def close_session(request: web.Request) -> web.Response:
    """Close a session and forget its tokens; one that is not open is closed already. What runs goes on."""
    context, body = context_of(request), await read_object(request)
    context.sessions.close(parse_request_id(body.get("session_id"), "session_id"))
    return web.Response()


def add_session_routes(app: web.Application) -> None:
    """Register the routes of this module."""
    for path, handler in (("/open_session", open_session), ("/close_session", close_session)):
        app.router.add_post(path, handler)
        app.router.add_get(path, handler)
