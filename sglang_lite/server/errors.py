"""Error bodies: the native envelope, the OpenAI object, and which of them a path speaks."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import msgspec
from aiohttp import web

from sglang_lite.types import RequestError

_OPENAI_PATHS = ("/v1/", "/tokenize", "/detokenize", "/invocations")
_ANTHROPIC_PATH = "/v1/messages"
_ANTHROPIC_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_OPENAI_NAMES = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}
_RETRYABLE = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)
RETRY_AFTER_SECONDS = "1"
"""What a client that was turned away for lack of room is told to wait."""
_encoder = msgspec.json.Encoder()


def encode_json(value: Any) -> bytes:
    """Compact JSON; NaN and infinities become null."""
    return _encoder.encode(value)


def json_response(value: Any, status: int = 200) -> web.Response:
    """A JSON reply."""
    return web.Response(body=encode_json(value), status=status, content_type="application/json")


def speaks_openai(path: str) -> bool:
    """Whether errors of ``path`` use the OpenAI error object."""
    return path.startswith(_OPENAI_PATHS)


def openai_error(message: str, status: int, *, kind: str | None = None, param: str | None = None) -> dict[str, Any]:
    """The flat error object of SGLang's OpenAI routes.

    ``kind`` defaults to ``BadRequestError`` for 400 and to the status as text for everything else.
    """
    if kind is None:
        kind = "BadRequestError" if status == HTTPStatus.BAD_REQUEST else str(status)
    return {"object": "error", "message": message, "type": kind, "param": param, "code": status}


def anthropic_error(message: str, status: int) -> dict[str, Any]:
    """The error object of Anthropic's routes. What went wrong inside the server is not told."""
    kind = _ANTHROPIC_KINDS.get(status)
    if kind is None:
        kind = "api_error" if status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"
    if kind == "api_error" and status != HTTPStatus.NOT_IMPLEMENTED:
        message = "Internal server error"
    return {"type": "error", "error": {"type": kind, "message": message}}


def http_error_body(path: str, message: str, status: int, kind: str) -> dict[str, Any]:
    """The body for what a path's framework refuses: an unknown route, a method, a body that is too large."""
    if path.startswith(_ANTHROPIC_PATH):
        return anthropic_error(message, status)
    return openai_error(message, status, kind=kind)


def native_error(message: str, status: int) -> dict[str, Any]:
    """The envelope of native routes: a message alone for bad input, SGLang's flat object inside for the rest."""
    if status < HTTPStatus.INTERNAL_SERVER_ERROR:
        return {"error": {"message": message}}
    return {**openai_error(message, status), "error": {"message": message, "code": status}}


def error_body(path: str, error: RequestError) -> dict[str, Any]:
    """The body that tells a client of ``path`` about ``error``."""
    if path.startswith(_ANTHROPIC_PATH):
        return anthropic_error(error.message, error.status)
    if speaks_openai(path):
        return openai_error(error.message, error.status, param=_OPENAI_NAMES.get(error.field or "", error.field))
    return native_error(error.message, error.status)


def error_response(path: str, error: RequestError) -> web.Response:
    """``error_body`` with the status of the error."""
    response = json_response(error_body(path, error), error.status)
    if error.status in _RETRYABLE:
        response.headers["Retry-After"] = RETRY_AFTER_SECONDS
    return response


def stream_error(path: str, error: RequestError) -> dict[str, Any]:
    """The event that ends a stream in which something went wrong."""
    kind = "invalid_request_error"
    if error.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        kind = HTTPStatus(error.status).name
    if speaks_openai(path):
        return {"error": openai_error(error.message, error.status, kind=kind, param=error.field)}
    retryable = error.status in _RETRYABLE
    return {"error": {"message": error.message, "type": kind, "code": error.status, "retryable": retryable}}
