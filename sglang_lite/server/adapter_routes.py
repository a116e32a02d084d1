"""Low-rank adapters over HTTP: loading and unloading them, and what a request says of the one it wants."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from typing import Any

from aiohttp import web

from sglang_lite.frontend.fields import read_str, wrong_type
from sglang_lite.server import fields
from sglang_lite.server.bodies import read_object
from sglang_lite.server.context import ServerContext, context_of
from sglang_lite.server.errors import json_response
from sglang_lite.types import RequestError

SEPARATOR = ":"
"""Between the model's name and the adapter's in the field ``model``."""


def split_model(context: ServerContext, name: str) -> tuple[str, str | None]:
    """``base:adapter`` -> (base, adapter), when the base is served here; else (name, None)."""
    for accepted in context.accepted_model_names:
        if accepted and name.startswith(accepted + SEPARATOR):
            return accepted, name.removeprefix(accepted + SEPARATOR) or None
    return name, None


def adapter_names(context: ServerContext, body: Mapping[str, Any], count: int) -> list[str | None]:
    """The adapter that each of ``count`` prompts goes through; None for the base model.

    The field ``model`` may name one as ``base:adapter``, which wins over ``lora_path``. The latter may be a list with
    a name or null for each prompt.

    Raises:
        RequestError: not text, or a list of another length.
    """
    model = body.get("model")
    chosen = split_model(context, model)[1] if isinstance(model, str) else None
    if chosen is not None:
        return [chosen] * count
    value = body.get("lora_path")
    if not isinstance(value, list):
        return [_name(value)] * count
    if len(value) != count:
        raise RequestError(f"lora_path has {len(value)} entries for {count} prompts", field="lora_path")
    return [_name(item) for item in value]


def _name(value: Any) -> str | None:
    return None if value is None else read_str("lora_path", value) or None


def adapter_cards(context: ServerContext, created: int) -> list[dict[str, Any]]:
    """The entries of ``/v1/models`` behind the model's own."""
    return [
        {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "sglang",
            "root": path,
            "parent": context.model_name,
            "max_model_len": None,
        }
        for name, path in context.engine.adapters.loaded.items()
    ]


async def load_lora_adapter(request: web.Request) -> web.Response:
    """Load an adapter from a directory on the server's machine."""
    engine, body = context_of(request).engine, await read_object(request)
    name, path = _required(body, "lora_name"), _required(body, "lora_path")
    pinned = fields.boolean(body, "pinned")
    return await _answer(request, engine.load_adapter(name, path, pinned=pinned))


async def unload_lora_adapter(request: web.Request) -> web.Response:
    """Unload an adapter when the requests that use it have ended."""
    engine, body = context_of(request).engine, await read_object(request)
    return await _answer(request, engine.unload_adapter(_required(body, "lora_name")))


def _required(body: Mapping[str, Any], name: str) -> str:
    value = body.get(name)
    if not isinstance(value, str) or not value:
        wrong_type(name, value, "a non-empty string")
    return value


async def _answer(request: web.Request, change: Awaitable[None]) -> web.Response:
    """Wait for a change; what it refuses is told in the body, with the adapters that are there now."""
    error: RequestError | None = None
    try:
        await change
    except RequestError as refused:
        if refused.status >= 500:
            raise
        error = refused
    body = {
        "success": error is None,
        "error_message": "" if error is None else str(error),
        "loaded_adapters": dict(context_of(request).engine.adapters.loaded),
    }
    return json_response(body, 200 if error is None else 400)


def add_adapter_routes(app: web.Application) -> None:
    """Register the routes of this module."""
    app.router.add_post("/load_lora_adapter", load_lora_adapter)
    app.router.add_post("/unload_lora_adapter", unload_lora_adapter)
