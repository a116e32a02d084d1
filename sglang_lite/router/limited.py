"""Requests under the limits of ``admission``, and what they are charged."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from sglang_lite.router.admission import BYTES_PER_TOKEN, Ticket
from sglang_lite.router.context import CONTEXT
from sglang_lite.router.errors import RouterError

_TICKET = web.RequestKey("ticket", Ticket)
_COUNT = re.compile(rb'"completion_tokens":\s{0,4}(\d{1,9})')
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def limited(handler: _Handler) -> _Handler:
    """``handler`` under the limits, where there are any."""

    async def run(request: web.Request) -> web.StreamResponse:
        context = request.app[CONTEXT]
        if not context.admission.is_limited:
            return await handler(request)
        cost = (request.content_length or len(await request.read())) // BYTES_PER_TOKEN
        try:
            async with context.admission.enter(context.tenants.of_call(request.headers), cost) as ticket:
                context.metrics.rate_limit.labels("allowed").inc()
                request[_TICKET] = ticket
                response = await handler(request)
                if isinstance(response, web.Response) and isinstance(response.body, bytes):
                    ticket.charge(sum(map(int, _COUNT.findall(response.body))))
                return response
        except RouterError as error:
            if error.code in ("too_many_requests", "queue_timeout"):
                context.metrics.rate_limit.labels("rejected").inc()
            raise

    return run


class MeteredStream(web.StreamResponse):
    """A stream whose events are charged as they are sent."""

    def __init__(self, ticket: Ticket, **options: Any) -> None:
        super().__init__(**options)
        self._ticket = ticket

    async def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send events."""
        self._ticket.charge(bytes(data).count(b"data:"))
        await super().write(data)


def stream_response(request: web.Request, status: int, headers: dict[str, str]) -> web.StreamResponse:
    """The beginning of a stream; a metered one where its request is under limits."""
    ticket = request.get(_TICKET)
    if ticket is not None:
        return MeteredStream(ticket, status=status, headers=headers)
    return web.StreamResponse(status=status, headers=headers)
