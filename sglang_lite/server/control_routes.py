"""Operator routes: abort, pause, continue, flush."""

from __future__ import annotations

from aiohttp import web

from sglang_lite.engine.carried_out import to_the_end
from sglang_lite.frontend.fields import describe
from sglang_lite.server.bodies import read_object
from sglang_lite.server.context import ServerContext, context_of
from sglang_lite.server.errors import json_response
from sglang_lite.types import RequestError

_PAUSE_MODES = ("abort", "retract", "in_place")
_SHOWN_PREFIXES = ("chatcmpl-", "cmpl-")
_MAX_FLUSH_WAIT = 3600.0


async def abort_request(request: web.Request) -> web.Response:
    """End requests by id (a prefix ends every request whose id starts with it), or all of them."""
    engine, body = context_of(request).engine, await read_object(request)
    abort_all = body.get("abort_all")
    if abort_all is not None and not isinstance(abort_all, bool):
        raise RequestError(f"abort_all must be a boolean, got {describe(abort_all)}", field="abort_all")
    if abort_all:
        count = await engine.abort_all()
        return json_response({"success": True, "message": f"Aborted {count} requests."})
    name = "request_id" if body.get("rid") is None and body.get("request_id") is not None else "rid"
    request_id = body.get(name)
    if not isinstance(request_id, str) or not request_id:
        raise RequestError(
            f"{name} must be a non-empty string (or set abort_all), got {describe(request_id)}", field=name
        )
    found = engine.abort(request_id)
    for prefix in _SHOWN_PREFIXES:
        # The OpenAI routes show a caller's id with a prefix; either spelling ends the request.
        if not found and request_id.startswith(prefix) and len(request_id) > len(prefix):
            found = engine.abort(request_id.removeprefix(prefix))
    if found:
        return json_response({"success": True, "message": f"Aborted request {request_id}."})
    return json_response({"success": False, "message": f"No running request has the id {request_id[:200]!r}."})


async def pause_generation(request: web.Request) -> web.Response:
    """Stop generating: ``abort`` ends what runs, ``retract`` frees its pages, ``in_place`` freezes it."""
    context, body = context_of(request), await read_object(request)
    mode = "abort" if body.get("mode") is None else body["mode"]
    if mode not in _PAUSE_MODES:
        raise RequestError(f"mode must be one of {', '.join(_PAUSE_MODES)}, got {describe(mode)}", field="mode")
    await to_the_end(_pause(context, mode))
    return json_response({"message": "Generation paused successfully.", "status": "ok", "success": True})


async def _pause(context: ServerContext, mode: str) -> None:
    await context.engine.pause(mode)
    context.paused = True


async def continue_generation(request: web.Request) -> web.Response:
    """Undo a pause."""
    context = context_of(request)
    await read_object(request, optional=True)
    await to_the_end(_resume(context))
    return json_response({"message": "Generation continued successfully.", "status": "ok", "success": True})


async def _resume(context: ServerContext) -> None:
    await context.engine.resume()
    context.paused = False


def _flush_timeout(text: str | None) -> float:
    if text is None:
        return 0.0
    try:
        timeout = float(text)
    except ValueError:
        timeout = -1.0
    if not 0 <= timeout <= _MAX_FLUSH_WAIT:
        raise RequestError(
            f"timeout must be between 0 and {_MAX_FLUSH_WAIT:g} seconds, got {text[:50]!r}", field="timeout"
        )
    return timeout


async def flush_cache(request: web.Request) -> web.Response:
    """Empty the prefix cache; refused while requests run, unless they end within ``timeout`` seconds."""
    if await context_of(request).engine.flush_cache(_flush_timeout(request.query.get("timeout"))):
        return web.Response(text="Cache flushed.\n")
    return web.Response(text="Flush cache failed. Requests are running or waiting.\n", status=400)


def add_control_routes(app: web.Application) -> None:
    """Register the routes of this module."""
    app.router.add_post("/abort_request", abort_request)
    app.router.add_post("/pause_generation", pause_generation)
    app.router.add_post("/continue_generation", continue_generation)
    app.router.add_get("/flush_cache", flush_cache)
    app.router.add_post("/flush_cache", flush_cache)
