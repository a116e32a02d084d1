"""Operator routes that record the engine's steps into a trace file."""

from __future__ import annotations

import os
import tempfile
from typing import Any

from aiohttp import web

from sglang_lite.frontend.fields import describe
from sglang_lite.server import fields
from sglang_lite.server.bodies import read_object
from sglang_lite.server.context import context_of
from sglang_lite.types import ProfileOptions, RequestError

_ACTIVITIES = ("CPU", "GPU")
_NOT_SUPPORTED = ("start_step", "profile_by_stage", "merge_profiles", "profile_stages", "detailed_annotations")
_MOST_STEPS = 1_000_000
_MAX_PREFIX_LENGTH = 64
_DIRECTORY_VARIABLE = "SGLANG_TORCH_PROFILER_DIR"


async def start_profile(request: web.Request) -> web.Response:
    """Record what every replica computes until ``/stop_profile`` or for ``num_steps`` steps."""
    context = context_of(request)
    options = _read_options(await read_object(request, optional=True))
    await context.engine.start_profile(options)
    return web.Response(text="Start profiling.\n")


async def stop_profile(request: web.Request) -> web.Response:
    """Write the trace."""
    await read_object(request, optional=True)
    file = await context_of(request).engine.stop_profile()
    return web.Response(text=f"Stop profiling. The trace is in {file}\n")


def _read_options(body: dict[str, Any]) -> ProfileOptions:
    for name in _NOT_SUPPORTED:
        if body.get(name) not in (None, False, []):
            raise RequestError(f"{name} is not supported; leave it out", field=name)
    activities = body.get("activities")
    if activities is not None and (not isinstance(activities, list) or any(a not in _ACTIVITIES for a in activities)):
        raise RequestError(
            f"activities may hold {' and '.join(_ACTIVITIES)}, got {describe(activities)}", field="activities"
        )
    directory = fields.text(body, "output_dir")
    if directory is None:
        directory = os.environ.get(_DIRECTORY_VARIABLE) or os.path.join(tempfile.gettempdir(), "sglang-lite-profiles")
    if not directory.strip() or "\0" in directory:
        raise RequestError("output_dir must name a directory", field="output_dir")
    prefix = _file_prefix(fields.text(body, "profile_prefix")) + _file_prefix(fields.text(body, "profile_id"))
    return ProfileOptions(
        output_dir=directory,
        num_steps=fields.integer(body, "num_steps", minimum=1, maximum=_MOST_STEPS) or 0,
        with_stack=fields.boolean(body, "with_stack"),
        record_shapes=fields.boolean(body, "record_shapes"),
        prefix=prefix,
    )


def _file_prefix(text: str | None) -> str:
    if text is None:
        return ""
    if len(text) > _MAX_PREFIX_LENGTH or not all(c.isalnum() or c in "-_." for c in text) or text.startswith("."):
        raise RequestError(
            f"a profile's prefix or id may have {_MAX_PREFIX_LENGTH} letters, digits, '-', '_' and '.', "
            f"got {describe(text)}",
            field="profile_prefix",
        )
    return f"{text}-"


def add_profile_routes(app: web.Application) -> None:
    """Register the routes of this module."""
    for method in ("GET", "POST"):
        app.router.add_route(method, "/start_profile", start_profile)
        app.router.add_route(method, "/stop_profile", stop_profile)
