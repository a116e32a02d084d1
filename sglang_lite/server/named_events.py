"""Streams whose events have names, as the Responses API and Anthropic's clients expect them."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any, Protocol

from aiohttp import web

from sglang_lite.frontend.request import GenerationOutput
from sglang_lite.server.errors import encode_json
from sglang_lite.server.generation import MergedStream
from sglang_lite.server.sse import EventStream
from sglang_lite.types import RequestError

logger = logging.getLogger(__name__)

Events = Iterable[dict[str, Any]]
"""Events in their order; ``type`` is the name of each."""


class NamedEventWriter(Protocol):
    """Makes the events of one reply with one sequence."""

    def events(self, output: GenerationOutput) -> Events:
        """What a new snapshot calls for."""

    def failure_events(self, error: RequestError) -> Events:
        """How the stream ends when something went wrong after its first event."""


async def reply_with_named_events(
    request: web.Request, merged: MergedStream, writer: NamedEventWriter
) -> web.StreamResponse:
    """Stream one sequence to the client. An error before the first snapshot is an ordinary error reply.

    Raises:
        RequestError: the request failed before anything was sent.
        ConnectionError: the client left; the sequence is aborted.
    """
    started = False
    async with EventStream(request) as stream, merged:
        try:
            async for _, output in merged:
                if not started:
                    await stream.start()
                    started = True
                await _send(stream, writer.events(output))
        except ConnectionError:
            raise
        except Exception as error:  # after the status, an event is the only way to tell the client
            if not started:
                raise
            await _send(stream, writer.failure_events(_request_error(request.path, error)))
        return await stream.finish()


async def _send(stream: EventStream, events: Events) -> None:
    for event in events:
        await stream.send_named(event["type"], encode_json(event))


def _request_error(path: str, error: Exception) -> RequestError:
    if isinstance(error, RequestError):
        return error
    logger.error("streaming %s failed", path, exc_info=error)
    return RequestError(f"Internal server error: {type(error).__name__}", status=500)
