"""API keys: which routes need which key, and a constant-time comparison.

Every route is closed unless it is named here: a route that somebody adds needs the key of the server.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping, Sequence

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from sglang_lite.server.absent_routes import ADMINISTRATION
from sglang_lite.server.errors import json_response
from sglang_lite.server.playground_routes import PATHS

OPEN_ROUTES = frozenset({"/health", "/health_generate", "/ready", "/metrics", *PATHS})
"""Routes without a key: what load balancers and Prometheus ask, and the files of the page, into which its reader types
the key that its calls need."""

OPERATOR_ROUTES = frozenset(
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
        "/release_memory_occupation",
        "/resume_memory_occupation",
        "/set_internal_state",
        "/remote_instance_transfer_engine_info",
        "/get_remote_instance_transfer_engine_info",
        *ADMINISTRATION,
    }
)
"""Routes that need the administrator's key where one is set."""


def presented_key(headers: Mapping[str, str]) -> str:
    """The key of a call: ``Authorization: Bearer KEY``, or ``x-api-key`` as Anthropic's clients send it; else ""."""
    scheme, _, token = headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return token.strip()
    return headers.get("x-api-key", "").strip()


def is_key(given: str, keys: Sequence[str]) -> bool:
    """Whether ``given`` is one of ``keys``. The time it takes tells neither which, nor how much of it was right."""
    # Bytes of a header that are no UTF-8 arrive as lone surrogates. Digests have one length, whatever was given.
    digest = hashlib.sha256(given.encode("utf-8", "surrogateescape")).digest()
    found = False
    for key in keys:
        expected = hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
        found |= hmac.compare_digest(digest, expected)
    return found and bool(given)


def is_allowed(
    method: str,
    path: str,
    authorization: str,
    api_key: str | None,
    admin_api_key: str | None,
    tenant_keys: Sequence[str] = (),
) -> bool:
    """Whether a call with this ``Authorization`` header may pass; see ``may_pass``."""
    return may_pass(method, path, presented_key({"Authorization": authorization}), api_key, admin_api_key, tenant_keys)


def may_pass(
    method: str,
    path: str,
    given: str,
    api_key: str | None,
    admin_api_key: str | None,
    tenant_keys: Sequence[str] = (),
) -> bool:
    """Whether a call with the key ``given`` may pass.

    Normal routes need ``api_key``, or the key of a tenant, when there is any. Operator routes need ``admin_api_key``
    when one is set, else ``api_key``; where only tenants have keys, no key opens them.
    """
    if method == "OPTIONS" or path in OPEN_ROUTES:
        return True
    if path in OPERATOR_ROUTES:
        required = admin_api_key or api_key
        if required:
            return is_key(given, [required])
        return not tenant_keys
    keys = [*([api_key] if api_key else []), *tenant_keys]
    return not keys or is_key(given, keys)


def auth_middleware(api_key: str | None, admin_api_key: str | None, tenant_keys: Sequence[str] = ()) -> Middleware:
    """A middleware that answers 401 to calls without the key that their route needs."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        # The route that will answer decides, not the spelling of the path.
        resource = request.match_info.route.resource
        path = request.path if resource is None else resource.canonical
        if may_pass(request.method, path, presented_key(request.headers), api_key, admin_api_key, tenant_keys):
            return await handler(request)
        response = json_response({"error": "Unauthorized"}, 401)
        response.headers["WWW-Authenticate"] = "Bearer"
        return response

    return check
