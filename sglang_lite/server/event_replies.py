"""Turning a merged stream into a reply of server-sent events."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any, Protocol

from aiohttp import web

from sglang_lite.frontend.request import GenerationOutput
from sglang_lite.server.errors import stream_error
from sglang_lite.server.generation import MergedStream
from sglang_lite.server.resumable import MARKS, reply_resumable
from sglang_lite.server.sse import EventStream
from sglang_lite.types import RequestError

logger = logging.getLogger(__name__)


class EventWriter(Protocol):
    """Makes the events of one kind of reply; it remembers how much of each sequence was sent."""

    def events(self, index: int, output: GenerationOutput) -> Iterable[Any]:
        """The events that a new snapshot of sequence ``index`` calls for; none when it shows nothing new.

        An event is an object or, where its shape is known beforehand, its JSON as bytes (``fixed_frames``).
        """

    def closing_events(self) -> Iterable[Any]:
        """The events after the end of all sequences."""


async def reply_with_events(request: web.Request, merged: MergedStream, writer: EventWriter) -> web.StreamResponse:
    """Stream ``merged`` to the client.

    The status is sent with the first snapshot: an error before it is an ordinary error reply. An error after it is
    an event, and the stream then ends without ``[DONE]``.

    Raises:
        RequestError: the request failed before anything was sent.
        ConnectionError: the client left; the sequences are aborted.
    """
    if MARKS in request:
        return await reply_resumable(request, merged, writer, _failure_event)
    started = False
    async with EventStream(request) as stream, merged:
        try:
            async for index, output in merged:
                for event in writer.events(index, output):
                    if not started:
                        await stream.start()
                        started = True
                    await stream.send(event)
        except ConnectionError:
            raise
        except Exception as error:  # after the status, an event is the only way to tell the client
            if not started:
                raise
            await stream.send(_failure_event(request.path, error))
            return await stream.finish()
        if not started:
            await stream.start()
        for event in writer.closing_events():
            await stream.send(event)
        await stream.done()
        return await stream.finish()


def _failure_event(path: str, error: Exception) -> dict[str, Any]:
    if isinstance(error, RequestError):
        return stream_error(path, error)
    logger.error("streaming %s failed", path, exc_info=error)
    return stream_error(path, RequestError(f"Internal server error: {type(error).__name__}", status=500))
