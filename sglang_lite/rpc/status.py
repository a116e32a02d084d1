"""Errors as gRPC statuses: one mapping for everything that the server refuses."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn, TypeAlias

import grpc

from sglang_lite.types import RequestError

logger = logging.getLogger(__name__)

Call: TypeAlias = Any
"""``grpc.aio.ServicerContext``; grpc has no types."""
Handler = Callable[[Any, Call], Awaitable[Any]]

HTTP_STATUS, HTTP_TYPE, HTTP_BODY = "x-sgl-status", "x-sgl-type", "x-sgl-body-bin"
"""Trailing metadata of refused calls: what the HTTP interface would have answered."""
_BODY_BYTES = 4096
_DETAILS_BYTES = 2048
"""Metadata of a call may have 8 KiB together; bytes of the body take a third more."""

_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    409: grpc.StatusCode.ALREADY_EXISTS,
    412: grpc.StatusCode.FAILED_PRECONDITION,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    415: grpc.StatusCode.INVALID_ARGUMENT,
    422: grpc.StatusCode.INVALID_ARGUMENT,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    499: grpc.StatusCode.CANCELLED,
    501: grpc.StatusCode.UNIMPLEMENTED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}


def code_of(status: int) -> grpc.StatusCode:
    """The gRPC code for what the HTTP interface answers with ``status``; INTERNAL for faults of the server."""
    if status in _CODES:
        return _CODES[status]
    return grpc.StatusCode.INVALID_ARGUMENT if 400 <= status < 500 else grpc.StatusCode.INTERNAL


class AnsweredError(RequestError):
    """An error that the HTTP application has answered with ``body`` of type ``kind``."""

    def __init__(self, message: str, status: int, body: bytes, kind: str, retry_after: str | None) -> None:
        super().__init__(message, status=status)
        self.body = body
        self.kind = kind
        self.retry_after = retry_after


def error_metadata(error: RequestError) -> tuple[tuple[str, str | bytes], ...]:
    """Trailing metadata: what a client of the HTTP interface would have got, where that is short enough."""
    told: list[tuple[str, str | bytes]] = [(HTTP_STATUS, str(error.status))]
    if isinstance(error, AnsweredError):
        if len(error.body) <= _BODY_BYTES:
            told += [(HTTP_BODY, error.body), (HTTP_TYPE, error.kind)]
        if error.retry_after is not None:
            told.append(("retry-after", error.retry_after))
    return tuple(told)


def _details(message: str) -> str:
    """As much of ``message`` as has room in a status line, where bytes outside of printable ASCII take three."""
    room = _DETAILS_BYTES
    text = message.encode("utf-8", "replace").decode()
    for place, character in enumerate(text):
        room -= 1 if " " <= character <= "~" and character != "%" else 3 * len(character.encode())
        if room < 0:
            return text[:place] + "..."
    return text


async def refuse(call: Call, error: RequestError) -> NoReturn:
    """End a call with the status of ``error``."""
    await call.abort(code_of(error.status), _details(error.message), error_metadata(error))
    raise AssertionError("abort() raises")


def with_status(handler: Handler) -> Handler:
    """``handler``, with what it raises told to the client: refusals as they are, faults of ours by their type alone."""

    @functools.wraps(handler)
    async def run(request: Any, call: Call) -> Any:
        try:
            return await handler(request, call)
        except RequestError as error:
            await refuse(call, error)
        except (asyncio.CancelledError, grpc.aio.AbortError):
            raise
        except Exception as error:  # one call's fault must not reach the others
            logger.exception("gRPC %s failed", handler.__name__)
            await refuse(call, RequestError(f"Internal server error: {type(error).__name__}", status=500))

    return run
