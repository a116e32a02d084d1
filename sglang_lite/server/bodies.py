"""Reading request bodies: size, content type, JSON."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
from aiohttp import web

from sglang_lite.frontend.request_limits import LIMITS
from sglang_lite.server.protocol_errors import take_body
from sglang_lite.types import RequestError

MAX_BODY_BYTES = LIMITS.body_bytes
"""Largest request body; a longer one is answered with 413."""

_decoder = msgspec.json.Decoder()


def decode_json(body: bytes) -> Any:
    """Decode a JSON body.

    Non-finite numbers, which strict JSON does not have but common clients send, are decoded so that the validation
    of the field can name it.

    Raises:
        RequestError: not JSON, or nested too deeply.
    """
    if not body.strip():
        raise RequestError("the request body is empty; expected a JSON object")
    try:
        return _decoder.decode(body)
    except RecursionError:
        raise RequestError("the request body is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        if not isinstance(error, msgspec.ValidationError) and b"NaN" not in body and b"Infinity" not in body:
            raise RequestError(f"the request body is not valid JSON: {error}") from None
    return _decode_lenient(body)


def _decode_lenient(body: bytes) -> Any:
    try:
        value = json.loads(body)
        # A lone surrogate passes json but can be neither tokenized nor sent back.
        msgspec.json.encode(value)
    except RecursionError:
        raise RequestError("the request body is nested too deeply") from None
    except ValueError as error:
        raise RequestError(f"the request body is not valid JSON: {error}") from None
    return value


async def read_object(request: web.Request, *, optional: bool = False) -> dict[str, Any]:
    """The JSON object in the body of ``request``; with ``optional`` an absent body counts as an empty object.

    Raises:
        RequestError: not a JSON object, not there in time, or not encoded as the headers say; on ``/v1`` routes also a
            content type other than application/json.
        web.HTTPRequestEntityTooLarge: more than the application's limit.
    """
    if optional and not request.can_read_body:
        return {}
    if request.content_length is not None and request.content_length > request.client_max_size:
        # Said before it comes: nothing of it has to be read.
        raise web.HTTPRequestEntityTooLarge(request.client_max_size, request.content_length)
    try:
        await take_body(request)
        async with asyncio.timeout(LIMITS.body_seconds):
            body = await request.read()
    except TimeoutError:
        raise RequestError(
            f"the request body did not arrive within {LIMITS.body_seconds:g} s; send it faster, or less of it",
            status=408,
        ) from None
    except web.RequestPayloadError as error:
        raise RequestError(f"the request body cannot be read: {str(error) or type(error).__name__}") from error
    if optional and not body.strip():
        return {}
    if request.path.startswith("/v1/") and request.content_type != "application/json":
        raise RequestError(
            f"Unsupported Media Type: Only 'application/json' is allowed, got {request.content_type[:100]!r}"
        )
    value = decode_json(body)
    if not isinstance(value, dict):
        raise RequestError(f"the request body must be a JSON object, got {_json_type(value)}")
    return value


def _json_type(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, list):
        return "an array"
    if isinstance(value, str):
        return "a string"
    return "a boolean" if isinstance(value, bool) else "a number"
