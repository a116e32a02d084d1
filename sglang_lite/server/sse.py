"""Server-sent events with a bounded backlog."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from aiohttp import web

from sglang_lite.server.context import context_of
from sglang_lite.server.errors import encode_json
from sglang_lite.server.stalled_reader import StalledReaderWatch

_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
_NO_MORE: Mapping[str, str] = {}
_DONE = b"data: [DONE]\n\n"
_BACKLOG_BYTES = 16 * 1024
"""Unsent bytes, in the process and in the kernel each, beyond which a stream waits for its reader."""


class EventStream:
    """A ``text/event-stream`` reply.

    ``send`` returns when the bytes are on their way or the backlog is small: a reader that is slower than the model
    makes the caller wait, and the caller then sends the newest snapshot instead of every one in between. One that
    does not read at all loses its connection after ``--stream-stall-timeout``. Use it as an asynchronous context
    manager.
    """

    def __init__(self, request: web.Request, headers: Mapping[str, str] = _NO_MORE) -> None:
        self._request = request
        self._response = web.StreamResponse(headers={**_HEADERS, **headers})
        self._response.content_type = "text/event-stream"
        self._watch: StalledReaderWatch | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._watch is not None:
            self._watch.close()

    async def start(self) -> None:
        """Send status 200 and the headers."""
        transport = self._request.transport
        if transport is not None:
            transport.set_write_buffer_limits(high=_BACKLOG_BYTES)
            connection = transport.get_extra_info("socket")
            low_water = getattr(socket, "TCP_NOTSENT_LOWAT", None)
            if low_water is not None and connection is not None and connection.family != socket.AF_UNIX:
                connection.setsockopt(socket.IPPROTO_TCP, low_water, _BACKLOG_BYTES)
            limit = context_of(self._request).config.stream_stall_timeout
            if limit:
                self._watch = StalledReaderWatch(transport, limit, self._request.path)
        await self._response.prepare(self._request)

    async def send(self, value: Any) -> None:
        """Send one event with ``value`` as JSON; bytes are JSON already.

        Raises:
            ConnectionError: the reader is gone.
        """
        data = value if type(value) is bytes else encode_json(value)
        await self._write(b"data: %b\n\n" % data)

    async def send_bytes(self, frames: bytes) -> None:
        """Send whole events as they are.

        Raises:
            ConnectionError: the reader is gone.
        """
        await self._write(frames)

    async def send_named(self, name: str, data: bytes) -> None:
        """Send one event with a name; ``data`` is JSON.

        Raises:
            ConnectionError: the reader is gone.
        """
        await self._write(b"event: %b\ndata: %b\n\n" % (name.encode(), data))

    async def done(self) -> None:
        """Send the ``[DONE]`` mark of a complete stream."""
        await self._write(_DONE)

    async def _write(self, frame: bytes) -> None:
        watch = self._watch
        if watch is None:
            await self._response.write(frame)
            await self._request.writer.drain()
            return
        watch.writes += 1
        watch.is_writing = True
        await self._response.write(frame)
        await self._request.writer.drain()
        watch.is_writing = False

    async def finish(self) -> web.StreamResponse:
        """End the body; the response to return from the handler."""
        if self._watch is not None:
            self._watch.is_writing = True
        await self._response.write_eof()
        return self._response
