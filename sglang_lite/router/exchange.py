"""One exchange with a worker: send a request, pass the stream on as it comes, or hand back the whole answer."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass

import aiohttp
from aiohttp import web

from sglang_lite.router.call import BEGUN, REQUEST_ID, Call
from sglang_lite.router.errors import UNREACHABLE, RouterError, error_body, too_slow
from sglang_lite.router.lease import Lease
from sglang_lite.router.limited import stream_response
from sglang_lite.router.migration import HEADER as RESUMABLE
from sglang_lite.router.migration import Movement
from sglang_lite.router.pair_side import Side
from sglang_lite.router.race import Leg
from sglang_lite.router.upstream import Begun, ByteStream, Upstream, check_status
from sglang_lite.router.workers import Worker

_RETURNED = (
    "content-type",
    "content-encoding",
    "retry-after",
    "cache-control",
    "x-accel-buffering",
    "www-authenticate",
)
RETRIED = frozenset({500, 503})
"""Statuses of workers after which another one is tried."""
FAULT, SHUTTING_DOWN = 500, 503
BROKEN = "The worker ended before its answer was complete; what came is not all of it. Send the request again."


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole answer of a worker.

    Attributes:
        is_probe: the request was the probe of the worker's breaker.
    """

    status: int
    headers: dict[str, str]
    body: bytes
    is_probe: bool = False


async def exchange(
    call: Call,
    worker: Worker,
    body: bytes,
    lease: Lease,
    side: Side | None = None,
    moving: Movement | None = None,
    leg: Leg | None = None,
) -> tuple[web.StreamResponse | None, Reply | None]:
    """Send ``body`` to ``worker``: the streamed response, already sent, or the whole reply, not sent yet.

    ``side`` is that of a pair. With ``leg`` the answer goes on only if it is the first of its race to begin.

    Raises:
        RouterError: upstream_unreachable or upstream_timeout, before anything went to the client, or in the middle of a
            stream that can move.
    """
    timeout = call.context.options.request_timeout_secs if leg is None else leg.seconds
    extra = {} if side is None else side.headers
    headers = {**call.headers, **extra}
    if worker.api_key:
        headers["authorization"] = f"Bearer {worker.api_key}"
    if moving is not None:
        headers[RESUMABLE] = "1"
    try:
        async with asyncio.timeout(timeout) as limit:
            async with call.context.request(
                worker, "POST", call.request.path_qs, data=body, headers=headers
            ) as upstream:
                check_status(upstream.status)
                streamed = upstream.content_type == "text/event-stream" and upstream.status < 400
                if streamed and (side is None or side.arrivals is not None):
                    content = await _content(upstream, side, leg)
                    limit.reschedule(None)
                    if moving is not None and (RESUMABLE in upstream.headers or has_begun(moving)):
                        return await _movable_stream(call, upstream, content, lease, moving), None
                    return await _stream(call, upstream, content, lease, extra), None
                if leg is not None and upstream.status not in RETRIED:
                    leg.claim(upstream.status)
                data = await upstream.read()
                kept = {name: upstream.headers[name] for name in _RETURNED if name in upstream.headers}
                if side is None or upstream.status != FAULT:  # of a pair, either side may be the reason
                    lease.judge(upstream.status < 500)
                if upstream.status == SHUTTING_DOWN:
                    call.context.suspect(worker)
                return None, Reply(upstream.status, {**kept, **extra}, data, lease.is_probe)
    except TimeoutError:
        if not limit.expired():
            raise
        if leg is None or not leg.is_hedge:  # a hedge had a part of the time
            lease.judge(False)
        raise RouterError("upstream_timeout", too_slow(call.context.options.request_timeout_secs)) from None
    except (aiohttp.ClientError, ConnectionError) as error:
        lease.judge(False)
        call.context.suspect(worker)
        raise RouterError("upstream_unreachable", UNREACHABLE) from error


async def _content(upstream: Upstream, side: Side | None, leg: Leg | None) -> ByteStream:
    """A stream. One that others may take the place of begins with its first part: there are servers that send the
    headers before they have done anything."""
    content = upstream.content
    if side is not None and side.arrivals is not None:
        return await side.arrivals.begin(content)
    if leg is None:
        return content
    first = await content.readany()
    leg.claim(upstream.status)
    return Begun(first, content)


class IdleWatch:
    """The time between two parts of a stream. It is set anew seldom, not for every part, so it may last a sixteenth
    longer.

    Attributes:
        scope: what the stream is read in; it ends with TimeoutError.
        writing: the client is waited for, not the worker.
    """

    def __init__(self, seconds: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._grain = seconds / 16
        self._seconds = seconds
        self._renewal = self._loop.time() + self._grain
        self.scope = asyncio.timeout(seconds + self._grain)
        self.writing = False

    def part(self) -> None:
        """A part has come and gone on."""
        self.writing = False
        now = self._loop.time()
        if now > self._renewal:
            self._renewal = now + self._grain
            self.scope.reschedule(now + self._seconds + self._grain)


def cut_off(call: Call, response: web.StreamResponse) -> web.StreamResponse:
    """The client has read nothing for too long, which says nothing about the worker."""
    if call.request.transport is not None:
        call.request.transport.abort()
    return response


async def _begin_stream(call: Call, upstream: Upstream, extra: dict[str, str] | None) -> web.StreamResponse:
    """Status and headers of a stream go to the client. One that is gone is noticed at the first write."""
    kept = {name: upstream.headers[name] for name in _RETURNED if name in upstream.headers}
    headers = {**kept, REQUEST_ID: call.request_id, **(extra or {})}
    response = stream_response(call.request, upstream.status, headers)
    with suppress(ConnectionError):
        await response.prepare(call.request)
    call.request[BEGUN] = response
    return response


async def _stream(
    call: Call, upstream: Upstream, content: ByteStream, lease: Lease, extra: dict[str, str] | None
) -> web.StreamResponse:
    """Pass a stream on as it comes. One that breaks ends with an error event and without [DONE]."""
    response = await _begin_stream(call, upstream, extra)
    watch = IdleWatch(call.context.options.request_timeout_secs)
    try:
        async with watch.scope:
            while data := await content.readany():
                watch.writing = True
                try:
                    await response.write(data)
                except ConnectionError:
                    return response  # the client is gone, which says nothing about the worker
                watch.part()
    except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
        if watch.writing:
            return cut_off(call, response)
        lease.judge(False)
        code = "upstream_timeout" if isinstance(error, TimeoutError) else "upstream_unreachable"
        return await end_stream(response, RouterError(code, BROKEN))
    lease.judge(True)
    with suppress(ConnectionError):
        await response.write_eof()
    return response


async def _movable_stream(
    call: Call, upstream: Upstream, content: ByteStream, lease: Lease, moving: Movement
) -> web.StreamResponse:
    """Pass on what has a mark; begins the client's stream unless another worker has.

    Raises:
        RouterError: the worker broke off; the stream may go on elsewhere.
    """
    if RESUMABLE not in upstream.headers:
        raise RouterError("upstream_unreachable", BROKEN)  # it would begin again
    if moving.response is None:
        moving.response = await _begin_stream(call, upstream, None)
    else:
        moving.moves += 1
        call.context.metrics.moves.inc()
    watch = IdleWatch(call.context.options.request_timeout_secs)
    try:
        async with watch.scope:
            more = True
            while more:
                data = await content.readany()
                more = bool(data)
                ready = moving.take(data) if more else moving.rest()
                if ready:
                    watch.writing = True
                    try:
                        await moving.response.write(ready)
                    except ConnectionError:
                        return moving.response  # the client is gone
                watch.part()
                if moving.failed:
                    raise ConnectionError("the worker cannot go on")
    except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
        if watch.writing:
            return cut_off(call, moving.response)
        lease.judge(False)
        code = "upstream_timeout" if isinstance(error, TimeoutError) else "upstream_unreachable"
        raise RouterError(code, BROKEN) from error
    lease.judge(True)
    with suppress(ConnectionError):
        await moving.response.write_eof()
    return moving.response


def has_begun(moving: Movement | None) -> bool:
    """Whether a client has the beginning of a stream that can move."""
    return moving is not None and moving.response is not None


async def end_stream(response: web.StreamResponse, error: RouterError) -> web.StreamResponse:
    """End a stream that has begun with an error event; a reader that is gone misses nothing."""
    with suppress(ConnectionError):
        await response.write(b"\n\ndata: " + error_body(error) + b"\n\n")
        await response.write_eof()
    return response


def whole(reply: Reply, request_id: str) -> web.Response:
    """A worker's whole answer as ours."""
    return web.Response(status=reply.status, body=reply.body, headers={**reply.headers, REQUEST_ID: request_id})
