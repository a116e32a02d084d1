"""Operator routes of the weights: replace them, name them, look at them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

from aiohttp import web

from sglang_lite.engine.carried_out import to_the_end
from sglang_lite.frontend.fields import describe, read_int
from sglang_lite.models.stored_values import checkpoint_stamp, stored_values
from sglang_lite.server import fields
from sglang_lite.server.bodies import read_object
from sglang_lite.server.context import ServerContext, context_of
from sglang_lite.server.errors import json_response
from sglang_lite.types import RequestError, StartupError

LOAD_FORMATS = ("auto", "safetensors")
MAX_VERSION_LENGTH = 256
_TRUNCATE_SIZE = 100
_MOST_ROWS = 2**31 - 1


def _version(body: dict[str, Any], name: str) -> str | None:
    version = fields.text(body, name)
    if version is not None and not 0 < len(version.strip()) <= MAX_VERSION_LENGTH:
        raise RequestError(f"{name} must have 1 to {MAX_VERSION_LENGTH} characters, got {len(version)}", field=name)
    return version


def _refused(message: str, **more: Any) -> web.Response:
    return json_response({"success": False, "message": message, **more}, 400)


async def update_weights_from_disk(request: web.Request) -> web.Response:
    """Load the weights of another directory of this machine in place of those that are served.

    Everything is checked first; what was served stays when anything is wrong, or while requests run.
    """
    context = context_of(request)
    try:
        body = await read_object(request)
        path, version = read_update(body)
        if fields.boolean(body, "abort_all_requests"):
            await context.engine.abort_all()
        await to_the_end(_serve_weights(context, path, version))
    except RequestError as error:
        if error.status != 400:
            raise
        return _refused(error.message, num_paused_requests=0)
    return json_response({"success": True, "message": f"Loaded the weights of {path}.", "num_paused_requests": 0})


async def _serve_weights(context: ServerContext, path: str, version: str | None) -> None:
    """Replace the weights, and note which ones are served."""
    await context.engine.update_weights(path)
    stamp = await asyncio.to_thread(checkpoint_stamp, path)
    context.weights = replace(context.weights, path=path, version=version or context.weights.version, stamp=stamp)


def read_update(body: dict[str, Any]) -> tuple[str, str | None]:
    """Directory and new version of an update.

    Raises:
        RequestError: the body is wrong.
    """
    path = fields.text(body, "model_path")
    if not path or not path.strip():
        raise RequestError(
            f"model_path must name a directory, got {describe(body.get('model_path'))}", field="model_path"
        )
    load_format = fields.text(body, "load_format") or "auto"
    if load_format not in LOAD_FORMATS:
        raise RequestError(
            f"load_format must be one of {', '.join(LOAD_FORMATS)}, got {load_format[:80]!r}", field="load_format"
        )
    for name, harmless in (("flush_cache", True), ("is_async", False), ("keep_pause", False), ("manifest", None)):
        if body.get(name) is not None and body[name] != harmless:
            raise RequestError(f"{name}={describe(body[name])} is not supported; leave it out", field=name)
    if not _is_directory(path):
        raise RequestError(f"model_path {path[:200]!r} is not a directory of this machine", field="model_path")
    return path, _version(body, "weight_version")


def _is_directory(path: str) -> bool:
    try:
        return Path(path).is_dir()
    except (OSError, ValueError):  # too long, or with a NUL
        return False


async def update_weight_version(request: web.Request) -> web.Response:
    """Give the weights another name."""
    context = context_of(request)
    try:
        body = await read_object(request)
        version = _version(body, "new_version")
        if version is None:
            raise RequestError("new_version must be a non-empty string", field="new_version")
        if fields.boolean(body, "abort_all_requests", default=True):
            await context.engine.abort_all()
    except RequestError as error:
        if error.status != 400:
            raise
        return _refused(error.message)
    context.weights = replace(context.weights, version=version)
    message = f"Weight version updated to {version}"
    return json_response({"success": True, "message": message, "new_version": version})


async def get_weights_by_name(request: web.Request) -> web.Response:
    """The first values of a tensor, as its checkpoint holds them.

    They are read from the files that were loaded, and refused when those have changed since.
    """
    context = context_of(request)
    body = await read_object(request, optional=True)
    for name, value in request.query.items():
        body.setdefault(
            name, int(value) if name == "truncate_size" and value.isdecimal() and len(value) < 12 else value
        )
    tensor = fields.text(body, "name") or ""
    if not tensor.strip():
        raise RequestError("name must be a non-empty string", field="name")
    rows = _TRUNCATE_SIZE if body.get("truncate_size") is None else read_int("truncate_size", body["truncate_size"])
    if not 1 <= rows <= _MOST_ROWS:
        raise RequestError(f"truncate_size must be at least 1, got {rows}", field="truncate_size")
    weights, description = context.weights, context.engine.description

    def read() -> list[Any]:
        if checkpoint_stamp(weights.path) != weights.stamp:
            raise RequestError(f"the files of {weights.path} have changed since they were loaded", field="name")
        return stored_values(weights.path, description, tensor, rows)

    try:
        return json_response(await asyncio.to_thread(read))
    except (StartupError, OSError) as error:
        raise RequestError(f"the weights of {weights.path} cannot be read: {error}", field="name") from error


def add_weight_routes(app: web.Application) -> None:
    """Register the routes of this module."""
    app.router.add_post("/update_weights_from_disk", update_weights_from_disk)
    app.router.add_post("/update_weight_version", update_weight_version)
    app.router.add_get("/get_weights_by_name", get_weights_by_name)
    app.router.add_post("/get_weights_by_name", get_weights_by_name)
