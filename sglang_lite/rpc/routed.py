"""JSON routes without an RPC of their own, over ``Complete``: metadata says which, and the messages carry its bodies.

A router sends what it got over HTTP on to a gRPC worker without a loss this way. Replies that tell of errors carry
the HTTP status and body in trailing metadata; messages and codes are those of every other call.
"""

from __future__ import annotations

from typing import Any

from sglang_lite.rpc.status import Call
from sglang_lite.types import RequestError

ROUTE = "x-sgl-route"
"""Metadata of a call: ``METHOD PATH[?QUERY]``."""
OFFER = ("x-sgl-routes", "1")
"""Initial metadata of ``GetServerInfo``: this server knows ``ROUTE``."""

_ROUTES = frozenset(
    {
        "/generate",
        "/encode",
        "/rerank",
        "/v1/messages",
        "/tokenize",
        "/detokenize",
        "/v1/tokenize",
        "/v1/detokenize",
        "/v1/loads",
        "/model_info",
        "/get_model_info",
        "/poll_transfers",
        "/flush_cache",
        "/abort_request",
        "/pause_generation",
        "/continue_generation",
        "/start_profile",
        "/stop_profile",
        "/update_weights_from_disk",
        "/update_weight_version",
        "/get_weights_by_name",
        "/remote_instance_transfer_engine_info",
        "/get_remote_instance_transfer_engine_info",
    }
)


def wanted_route(call: Call) -> tuple[str, str] | None:
    """Method and path (with query) that a call of ``Complete`` asks for; None for the RPC's own route.

    Raises:
        RequestError: 404, the route is not served this way.
    """
    metadata: Any = call.invocation_metadata() or ()
    text = next((value for name, value in metadata if name == ROUTE), None)
    if text is None:
        return None
    method, _, path = str(text).partition(" ")
    if method not in ("GET", "POST") or path.partition("?")[0] not in _ROUTES:
        raise RequestError(f"{ROUTE} {str(text)[:100]!r}: no such route", status=404)
    return method, path
