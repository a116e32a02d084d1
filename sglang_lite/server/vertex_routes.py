"""Vertex AI's prediction route: instances and parameters in, predictions out, generated as by ``/generate``."""

from __future__ import annotations

import os
from typing import Any

from aiohttp import web

from sglang_lite.frontend.fields import read_object as read_mapping
from sglang_lite.frontend.fields import shorten, wrong_type
from sglang_lite.server import fields
from sglang_lite.server.bodies import read_object
from sglang_lite.server.errors import json_response
from sglang_lite.server.native_routes import answer
from sglang_lite.types import RequestError, StartupError

PROMPTS = ("text", "input_ids", "input_embeds")


def vertex_path() -> str:
    """Where the platform sends predictions: ``AIP_PREDICT_ROUTE``, else ``/vertex_generate``."""
    return os.environ.get("AIP_PREDICT_ROUTE") or "/vertex_generate"


def generate_body(body: dict[str, Any]) -> dict[str, Any]:
    """The body of ``/generate`` that a prediction stands for; empty without instances.

    Raises:
        RequestError: an instance has no prompt, or they have different kinds of prompts.
    """
    instances = body.get("instances")
    if not isinstance(instances, list):
        wrong_type("instances", instances, "a sequence of maps")
    given = [read_mapping(f"instances[{index}]", instance) for index, instance in enumerate(instances)]
    parameters = fields.mapping(body, "parameters")
    if not given:
        return {}
    name = next((name for name in PROMPTS if given[0].get(name)), None)
    if name is None:
        raise RequestError("instances[0] has no prompt: send text, input_ids or input_embeds", field="instances")
    missing = next((index for index, instance in enumerate(given) if instance.get(name) is None), None)
    if missing is not None:
        raise RequestError(f"instances[{missing}] has no {name}, as the first instance does", field="instances")
    twice = next((key for key in PROMPTS if key in parameters), None)
    if twice is not None:
        raise RequestError(f"parameters.{twice}: prompts belong to the instances", field="parameters")
    made: dict[str, Any] = {name: [instance[name] for instance in given]}
    for media in ("image_data", "video_data", "audio_data"):
        if any(instance.get(media) is not None for instance in given):
            made[media] = [instance.get(media) for instance in given]
    return made | dict(parameters)


async def vertex_generate(request: web.Request) -> web.StreamResponse:
    """Generate for every instance; with ``stream`` among the parameters, the events of ``/generate``."""
    body = generate_body(await read_object(request))
    if not body:
        return json_response([])
    reply = await answer(request, body)
    return reply if isinstance(reply, web.StreamResponse) else json_response({"predictions": reply})


def add_vertex_routes(app: web.Application) -> None:
    """Register the route of this module.

    Raises:
        StartupError: ``AIP_PREDICT_ROUTE`` is no path, or that of another route.
    """
    path = vertex_path()
    taken = {resource.canonical for resource in app.router.resources()}
    if not path.startswith("/") or path in taken or "{" in path:
        raise StartupError(f"AIP_PREDICT_ROUTE must be a path that no other route has, got {shorten(path)!r}")
    app.router.add_post(path, vertex_generate)
