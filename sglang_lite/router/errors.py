"""What the router itself answers when no worker's answer can be passed on."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus

import msgspec
from aiohttp import web

STATUS = {
    "bad_request": 400,
    "unauthorized": 401,
    "forbidden": 403,
    "not_found": 404,
    "model_not_found": 404,
    "worker_not_found": 404,
    "method_not_allowed": 405,
    "queue_timeout": 408,
    "request_timeout": 408,
    "payload_too_large": 413,
    "unknown_field": 422,
    "too_many_requests": 429,
    "upstream_unreachable": 502,
    "upstream_status": 502,
    "upstream_timeout": 502,
    "no_healthy_workers": 503,
    "no_prefill_workers_available": 503,
    "no_decode_workers_available": 503,
    "breaker_open": 503,
    "worker_misconfigured": 503,
    "draining": 503,
    "stale_request_expired": 504,
    "internal_error": 500,
}
"""Code of an error -> HTTP status."""

CODE_HEADER = "x-router-error-code"

NOT_AN_OBJECT = "The request body must be a JSON object with the fields of this path; check its syntax and its length."
NO_ATTEMPT = "The router tried no worker, which is its own fault; its log says more. Try again."
ALL_REST = (
    "All workers for this request have failed lately and rest (--cb-timeout-duration-secs); try again later, and see "
    "/workers for their state."
)
UNREACHABLE = "A worker cannot be reached; try again later. /workers shows which of them are healthy."
NO_SUCH_PATH = "This path does not exist here; docs/router.md lists those that do. Check its spelling."


def too_slow(seconds: float) -> str:
    """The message of upstream_timeout."""
    return f"A worker did not answer within {seconds:g} s (--request-timeout-secs); ask for less at once, or stream."


class RouterError(Exception):
    """An answer of the router itself, with ``headers`` beside its code. ``message`` is for clients: it never names a
    worker."""

    def __init__(self, code: str, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.headers = dict(headers or {})
        self.code = code
        self.message = message
        self.status = STATUS[code]


def error_body(error: RouterError) -> bytes:
    """The envelope as JSON."""
    kind = "invalid_request_error" if error.status < HTTPStatus.INTERNAL_SERVER_ERROR else "server_error"
    return msgspec.json.encode({"error": {"type": kind, "code": error.code, "message": error.message}})


def error_response(error: RouterError) -> web.Response:
    """The envelope with its status and header."""
    return web.Response(
        body=error_body(error),
        status=error.status,
        content_type="application/json",
        headers={**error.headers, CODE_HEADER: error.code},
    )
