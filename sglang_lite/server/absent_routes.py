"""Endpoints of SGLang, OpenAI, Anthropic and Ollama that are not built: 501 with the reason, never a stand-in."""

from __future__ import annotations

from aiohttp import web

from sglang_lite.types import RequestError

_OLLAMA = "Ollama's API is not served; use /v1/chat/completions, /v1/completions and /v1/models"

_WEIGHTS = "weights do not come from another process; use /update_weights_from_disk"

ADMINISTRATION = {
    "/load_lora_adapter_from_tensors": "use /load_lora_adapter with a directory on the server's machine",
    "/init_weights_update_group": _WEIGHTS,
    "/destroy_weights_update_group": _WEIGHTS,
    "/update_weights_from_distributed": _WEIGHTS,
    "/update_weights_from_tensor": _WEIGHTS,
    "/update_weights_from_ipc": _WEIGHTS,
}
"""Absent endpoints that need the administrator's key where one is set, and what to use instead."""

_OTHERS = {
    "/v1/audio/transcriptions": "models for audio are not served",
    "/api/chat": _OLLAMA,
    "/api/generate": _OLLAMA,
    "/api/tags": _OLLAMA,
    "/api/show": _OLLAMA,
}


async def absent(request: web.Request) -> web.Response:
    """Say that the endpoint is known and not there."""
    reason = ADMINISTRATION.get(request.path) or _OTHERS.get(request.path, "")
    raise RequestError(f"{request.path[:200]} is not supported by this version of sglang-lite: {reason}", status=501)


def add_absent_routes(app: web.Application) -> None:
    """Register the routes of this module, for every method."""
    for path in (*ADMINISTRATION, *_OTHERS):
        app.router.add_route("*", path, absent)
