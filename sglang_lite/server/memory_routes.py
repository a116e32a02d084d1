"""Operator routes that give memory back while the engine is idle, and set the few options that may change."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from sglang_lite.engine.messages import MEMORY_TAGS, MemoryTag
from sglang_lite.frontend.fields import read_bool, read_int, shorten, wrong_type
from sglang_lite.server import fields
from sglang_lite.server.bodies import read_object
from sglang_lite.server.context import ServerContext, context_of
from sglang_lite.server.errors import json_response
from sglang_lite.types import RequestError

CHANGEABLE = ("stream_interval", "incremental_streaming_output", "max_concurrent_requests")
"""Options that a running server changes: the front looks at them for every request."""

_MOST = 2**20


def read_tags(body: dict[str, Any]) -> tuple[MemoryTag, ...]:
    """``tags``; all of them when there are none.

    Raises:
        RequestError: a tag that is not known.
    """
    given = body.get("tags")
    if given is not None and not isinstance(given, list):
        wrong_type("tags", given, "a sequence of strings")
    unknown = next((tag for tag in given or () if tag not in MEMORY_TAGS), None)
    if unknown is not None:
        raise RequestError(f"tags may hold {' and '.join(MEMORY_TAGS)}, got {shorten(unknown)!r}", field="tags")
    return tuple(tag for tag in MEMORY_TAGS if not given or tag in given)


def _require_saver(context: ServerContext) -> None:
    if not context.config.enable_memory_saver:
        raise RequestError(
            "memory is given back by servers that were started with --enable-memory-saver; pause this one with "
            "/pause_generation, or end it",
            status=501,
        )


async def release_memory(request: web.Request) -> web.Response:
    """Give the memory of the KV pool, of the weights or of both back; requests are refused until it is resumed."""
    context, body = context_of(request), await read_object(request, optional=True)
    tags = read_tags(body)
    _require_saver(context)
    await context.engine.release_memory(tags)
    return json_response(None)


async def resume_memory(request: web.Request) -> web.Response:
    """Take the memory again: an empty KV pool, the weights from the directory that they came from."""
    context, body = context_of(request), await read_object(request, optional=True)
    tags = read_tags(body)
    _require_saver(context)
    await context.engine.resume_memory(tags)
    return json_response(None)


async def set_internal_state(request: web.Request) -> web.Response:
    """Change options of the running server; the reply has one ``true`` for each replica.

    Raises:
        RequestError: an option that does not change while the server runs, or a wrong value; nothing was changed then.
    """
    context, body = context_of(request), await read_object(request)
    wanted = fields.mapping(body, "server_args")
    for name, value in wanted.items():
        if name not in CHANGEABLE:
            raise RequestError(
                f"{shorten(name)} cannot be changed while the server runs; {', '.join(CHANGEABLE)} can, and "
                "/server_info shows all options",
                field="server_args",
            )
        if name == "incremental_streaming_output":
            read_bool(name, value)
        elif not 1 <= read_int(name, value) <= _MOST:
            raise RequestError(f"{name} must be between 1 and {_MOST}, got {value}", field=name)
    if wanted:
        context.change_options(dict(wanted))
    return json_response([True] * context.config.dp_size)


def add_memory_routes(app: web.Application) -> None:
    """Register the routes of this module."""
    for path, handler in (
        ("/release_memory_occupation", release_memory),
        ("/resume_memory_occupation", resume_memory),
    ):
        app.router.add_post(path, handler)
        app.router.add_get(path, handler)
    app.router.add_post("/set_internal_state", set_internal_state)
    app.router.add_put("/set_internal_state", set_internal_state)
