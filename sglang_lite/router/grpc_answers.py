"""Answers of gRPC workers in the form of HTTP: statuses, bodies, and events of streams."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import grpc
import msgspec
from multidict import CIMultiDict

from sglang_lite.router.upstream import ByteStream

_STATUS = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.ALREADY_EXISTS: 409,
    grpc.StatusCode.FAILED_PRECONDITION: 412,
    grpc.StatusCode.OUT_OF_RANGE: 400,
    grpc.StatusCode.ABORTED: 409,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.UNIMPLEMENTED: 501,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}
_LOST = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
"""Codes that the transport makes when a worker is gone. A worker that means them says so in its metadata."""
_RETURNED = ("retry-after",)


class GrpcBrokenError(ConnectionError):
    """The worker could not be reached, or its answer ended before it was complete."""


@dataclass(slots=True, frozen=True)
class Answer:
    """An answer with its body, or the stream of it; see ``upstream.Upstream``."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    stream: ByteStream | None = None

    @property
    def content_type(self) -> str:
        """Type of the body, without parameters."""
        return self.headers.get("content-type", "").partition(";")[0].strip()

    @property
    def content(self) -> ByteStream:
        """The body as it comes."""
        return self.stream or _Whole(self.body)

    async def read(self) -> bytes:
        """The whole body."""
        if self.stream is None:
            return self.body
        parts = []
        while part := await self.stream.readany():
            parts.append(part)
        return b"".join(parts)


class _Whole:
    """A body that is here."""

    def __init__(self, body: bytes) -> None:
        self._body = body

    async def readany(self) -> bytes:
        """All of it, then nothing."""
        body, self._body = self._body, b""
        return body


def answer(body: bytes, status: int = 200, kind: str | None = None) -> Answer:
    """A whole answer; without ``kind`` it is JSON where it looks like that."""
    looks = "application/json" if body[:1] in (b"{", b"[", b'"') else "text/plain; charset=utf-8"
    return Answer(status, CIMultiDict({"content-type": kind or looks}), body)


def json_answer(value: Any, status: int = 200) -> Answer:
    """A whole answer with ``value`` as JSON."""
    return answer(msgspec.json.encode(value), status, "application/json")


def refusal(path: str, message: str, status: int) -> Answer:
    """The error object of a route's interface."""
    if not path.startswith(("/v1/", "/tokenize", "/detokenize")):
        return json_answer({"error": {"message": message}}, status)
    kind = "BadRequestError" if status == 400 else str(status)
    return json_answer({"object": "error", "message": message, "type": kind, "param": None, "code": status}, status)


def _told(error: Any) -> dict[str, Any]:
    """Trailing metadata of a failed call."""
    return dict(error.trailing_metadata() or ())


def failure_answer(path: str, error: Any) -> Answer:
    """What a call failed with before its first message, as an answer.

    Raises:
        GrpcBrokenError: the worker did not answer at all.
    """
    told, code = _told(error), error.code()
    if "x-sgl-status" not in told and code in _LOST:
        raise GrpcBrokenError(f"{code.name}: {error.details()}") from error
    given = str(told.get("x-sgl-status", ""))
    status = int(given) if given.isdigit() and 400 <= int(given) < 600 else _STATUS.get(code, 500)
    body = told.get("x-sgl-body-bin")
    if isinstance(body, bytes):
        found = answer(body, status, told.get("x-sgl-type") or None)
    else:
        found = refusal(path, error.details() or code.name, status)
    kept = CIMultiDict(found.headers)
    kept.update({name: str(told[name]) for name in _RETURNED if name in told})
    return Answer(status, kept, found.body)


class Frames:
    """Turns messages of one stream into server-sent events.

    Args:
        data: the JSON of a message.
        named: events have names, and no ``[DONE]`` follows them.
    """

    def __init__(self, data: Callable[[Any], bytes], named: bool) -> None:
        self._data = data
        self._named = named
        self.failed = False

    def frame(self, message: Any) -> bytes:
        """The event of a message; ``failed`` is then set when it tells of an error."""
        data = self._data(message)
        if data.startswith(b":"):
            return data + b"\n\n"  # a comment between events
        if self._named:
            kind = msgspec.json.decode(data, type=_Kind).type
            self.failed = self.failed or kind in ("error", "response.failed")
            return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)
        self.failed = self.failed or data.startswith(b'{"error":')
        return b"data: %b\n\n" % data

    @property
    def ending(self) -> bytes:
        """What follows the last message of a complete stream."""
        return b"" if self._named or self.failed else b"data: [DONE]\n\n"


class _Kind(msgspec.Struct):
    type: str = "message"


class Replies:
    """The body of a stream, made of the messages of a call."""

    def __init__(self, call: Any, frames: Frames) -> None:
        self._call = call
        self._frames = frames
        self._first: bytes | None = None
        self._ended = False

    async def start(self) -> None:
        """Wait for the first message.

        Raises:
            grpc.aio.AioRpcError: the call is refused.
        """
        self._first = await self._next()

    async def readany(self) -> bytes:
        """The next event, or nothing at the end.

        Raises:
            GrpcBrokenError: the call ended before its answer was complete.
        """
        if self._first is not None:
            first, self._first = self._first, None
            return first
        try:
            return await self._next()
        except grpc.aio.AioRpcError as error:
            if self._frames.failed:
                return b""  # an event has told of it
            raise GrpcBrokenError(f"{error.code().name}: {error.details()}") from error

    async def _next(self) -> bytes:
        if self._ended:
            return b""
        message = await self._call.read()
        if message is not grpc.aio.EOF:
            return self._frames.frame(message)
        self._ended = True
        return self._frames.ending
