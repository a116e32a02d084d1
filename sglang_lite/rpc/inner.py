"""The routes of the HTTP application, called by the gRPC services over a private socket.

What both interfaces serve is served by one function, behind the same authentication, validation and metrics.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import aiohttp
import msgspec
from multidict import CIMultiDict

from sglang_lite.rpc.status import AnsweredError, Call
from sglang_lite.types import RequestError

_TRACE_HEADERS = frozenset({"traceparent", "tracestate", "baggage"})
HOP_HEADERS = frozenset(
    {
        "host",
        "connection",
        "te",
        "user-agent",
        "x-sgl-route",
        "transfer-encoding",
        "accept-encoding",
        "expect",
        "upgrade",
    }
)
RESUMABLE = "x-sgl-resumable"
"""Header, and initial metadata, of streams that can go on at another server (``server.resumable``)."""
MARK = b":sgl "
_NAMED_EVENTS = ("/v1/responses", "/v1/messages")
"""Routes whose streams end without ``[DONE]``."""
_LINE_BYTES = 256 * 1024 * 1024
"""An event of a stream is one line: as long as a message may be."""
_READ_BYTES = 64 * 1024


def headers_of(call: Call, trace_headers: Mapping[str, str] | None = None) -> CIMultiDict[str]:
    """The metadata of a call as HTTP headers; ``trace_headers`` of its message add where its trace belongs."""
    headers: CIMultiDict[str] = CIMultiDict()
    for name, value in call.invocation_metadata() or ():
        lowered = name.lower()
        is_ours = lowered in HOP_HEADERS or lowered.startswith((":", "grpc-", "content-"))
        if not is_ours and isinstance(value, str) and "\r" not in value and "\n" not in value:
            headers.add(name, value)
    for name, value in (trace_headers or {}).items():
        if name.lower() in _TRACE_HEADERS and value.isprintable():
            headers[name] = value
    return headers


@dataclass(slots=True, frozen=True)
class InnerReply:
    """A whole reply of the HTTP application."""

    status: int
    body: bytes
    content_type_line: str
    retry_after: str | None = None

    @classmethod
    async def read(cls, reply: aiohttp.ClientResponse) -> InnerReply:
        """The rest of ``reply``."""
        kind, later = (reply.headers.get(name) for name in ("Content-Type", "Retry-After"))
        return cls(reply.status, await reply.read(), kind or "", later)

    @property
    def text(self) -> str:
        """The body as text."""
        return self.body.decode("utf-8", "replace").strip()

    def json(self) -> Any:
        """The body, decoded.

        Raises:
            RequestError: the reply tells of an error; its message and status.
        """
        self.raise_for_status()
        return msgspec.json.decode(self.body)

    def raise_for_status(self) -> None:
        """Raises RequestError when the reply tells of an error."""
        if self.status >= 400:
            message = _message(self.body) or f"HTTP {self.status}"
            raise AnsweredError(message, self.status, self.body, self.content_type_line, self.retry_after)


def _message(body: bytes) -> str:
    """The message of an error body, in whichever of the shapes of the HTTP interface."""
    try:
        value = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return body.decode("utf-8", "replace").strip()
    if not isinstance(value, dict):
        return ""
    error = value.get("error")
    if isinstance(error, dict):
        return str(error.get("message", ""))
    found = error if isinstance(error, str) else value.get("message") or value.get("error_message")
    return str(found or "")


class Inner:
    """A client of the HTTP application of this process. Used by one event loop; ``async with`` closes it.

    Args:
        path: of the Unix socket at which it listens.
    """

    def __init__(self, path: str) -> None:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.UnixConnector(path, limit=0),
            timeout=aiohttp.ClientTimeout(total=None),
            auto_decompress=False,
            read_bufsize=_READ_BYTES,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    @asynccontextmanager
    async def open(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """A call whose reply is still to be read; leaving it early ends what it has started.

        Raises:
            RequestError: 503, the application does not listen any more.
        """
        sent: CIMultiDict[str] = CIMultiDict(headers or {})
        if body is not None:
            sent["Content-Type"] = "application/json"
        try:
            async with self._session.request(method, f"http://inner{path}", data=body, headers=sent) as reply:
                yield reply
        except aiohttp.ClientError as error:
            raise RequestError(f"the server is going down: {type(error).__name__}", status=503) from error

    async def call(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> InnerReply:
        """One call and its whole reply, whatever its status. ``body`` is bytes, or sent as JSON."""
        data = body if body is None or isinstance(body, bytes) else msgspec.json.encode(body)
        async with self.open(method, path, data, headers) as reply:
            return await InnerReply.read(reply)

    async def messages(
        self,
        path: str,
        body: bytes | None,
        headers: Mapping[str, str],
        method: str = "POST",
        begin: Callable[[Mapping[str, str]], Awaitable[None]] | None = None,
    ) -> AsyncIterator[bytes]:
        """Send ``body``; the JSON of the reply, or of every event where it is a stream.

        ``begin`` is called with the headers of a stream. One with ``RESUMABLE`` has marks between its events, which
        start with ``MARK`` and are no JSON.

        Raises:
            RequestError: the reply tells of an error, or the stream ended with one (after its event).
        """
        async with self.open(method, path, body, headers) as reply:
            if reply.status >= 400 or reply.content_type != "text/event-stream":
                whole = await InnerReply.read(reply)
                whole.raise_for_status()
                yield whole.body
                return
            if begin is not None:
                await begin(reply.headers)
            complete, failure = False, None
            async for data in _event_data(reply.content, RESUMABLE in reply.headers):
                if data == b"[DONE]":
                    complete = True
                    continue
                yield data
                failure = failure or _failure(data)
            if failure is not None:
                raise failure
            if not complete and not path.startswith(_NAMED_EVENTS):
                raise RequestError("the stream ended early", status=500)


async def _event_data(content: aiohttp.StreamReader, marks: bool) -> AsyncIterator[bytes]:
    """The ``data:`` lines of server-sent events, of which every event of ours has one, and the marks between them."""
    pending = bytearray()
    async for chunk in content.iter_any():
        pending += chunk
        *lines, rest = pending.split(b"\n")
        pending = rest
        if len(pending) > _LINE_BYTES:
            raise RequestError("an event is longer than a message may be", status=500)
        for line in lines:
            if line.startswith(b"data: "):
                yield bytes(line[6:])
            elif marks and line.startswith(MARK):
                yield bytes(line)


def _failure(data: bytes) -> RequestError | None:
    """The error that an event of a stream tells, if it is one."""
    if not data.startswith(b'{"error":'):
        return None
    error = msgspec.json.decode(data).get("error")
    if not isinstance(error, dict):
        return None
    code = error.get("code")
    return RequestError(str(error.get("message", "")), status=code if isinstance(code, int) else 500)
