"""API keys: which routes need which key, and a constant-time comparison."""

from __future__ import annotations

import hmac

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from sglang_lite.server.absent_routes import ADMINISTRATION
from sglang_lite.server.errors import json_response

_OPEN_PREFIXES = ("/health", "/ready", "/metrics")
_ADMIN_OPTIONAL = frozenset(
    {
        "/abort_request",
        "/pause_generation",
        "/continue_generation",
        "/flush_cache",
        "/update_weights_from_disk",
        "/update_weight_version",
        "/get_weights_by_name",
        "/start_profile",
        "/stop_profile",
        "/load_lora_adapter",
        "/unload_lora_adapter",
        *ADMINISTRATION,
    }
)


def _matches(authorization: str, key: str) -> bool:
    scheme, _, token = authorization.partition(" ")
    # Bytes of a header that are no UTF-8 arrive as lone surrogates.
    given = token.strip().encode("utf-8", "surrogateescape")
    return scheme.lower() == "bearer" and hmac.compare_digest(given, key.encode("utf-8", "surrogateescape"))


def is_allowed(method: str, path: str, authorization: str, api_key: str | None, admin_api_key: str | None) -> bool:
    """Whether a call may pass.

    Normal routes need ``api_key`` when one is set. Operator routes need ``admin_api_key`` when one is set, else
    ``api_key``. Health, readiness and metrics are always open.
    """
    if method == "OPTIONS" or path.startswith(_OPEN_PREFIXES):
        return True
    required = admin_api_key if path in _ADMIN_OPTIONAL and admin_api_key else api_key
    return not required or _matches(authorization, required)


def auth_middleware(api_key: str | None, admin_api_key: str | None) -> Middleware:
    """A middleware that answers 401 to calls without the key that their route needs."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        authorization = request.headers.get("Authorization", "")
        if is_allowed(request.method, request.path, authorization, api_key, admin_api_key):
            return await handler(request)
        return json_response({"error": "Unauthorized"}, 401)

    return check
