"""Endpoints of SGLang, OpenAI, Anthropic and Ollama that are not built: 501 with the reason, never a stand-in."""

from __future__ import annotations

from aiohttp import web

from sglang_lite.types import RequestError

ADMINISTRATION = (
    "/release_memory_occupation",
    "/resume_memory_occupation",
    "/set_internal_state",
    "/load_lora_adapter_from_tensors",
)
"""Absent endpoints that need the administrator's key where one is set."""

_OTHERS = (
    "/classify",
    "/v1/audio/transcriptions",
    "/api/chat",
    "/api/generate",
    "/api/tags",
    "/api/show",
    "/open_session",
    "/close_session",
    "/vertex_generate",
)


async def absent(request: web.Request) -> web.Response:
    """Say that the endpoint is known and not there."""
    raise RequestError(f"{request.path[:200]} is not supported by this version of sglang-lite", status=501)


def add_absent_routes(app: web.Application) -> None:
    """Register the routes of this module, for every method."""
    for path in (*ADMINISTRATION, *_OTHERS):
        app.router.add_route("*", path, absent)
