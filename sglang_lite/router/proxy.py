"""Requests to one worker: choose, send, try another one before the first byte, pass the answer on."""

from __future__ import annotations

import asyncio
import random
import re
import string
from contextlib import suppress
from dataclasses import dataclass

import aiohttp
from aiohttp import web

from sglang_lite.router.access import CALLER, NOBODY
from sglang_lite.router.body import Head, parse_head
from sglang_lite.router.context import CONTEXT, RouterContext
from sglang_lite.router.errors import RouterError, error_body
from sglang_lite.router.migration import HEADER as RESUMABLE
from sglang_lite.router.migration import Movement, movement
from sglang_lite.router.prompt import Prompt
from sglang_lite.router.upstream import Upstream
from sglang_lite.router.workers import Worker, usable

REQUEST_ID = "x-request-id"
_ROUTING_KEYS = ("x-sgl-route-key", "x-smg-routing-key")
_DROPPED = frozenset(
    {
        "cookie",
        "host",
        "content-length",
        "transfer-encoding",
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "te",
        "trailer",
        "upgrade",
        "expect",
        "accept-encoding",
        "x-sgl-decode-url",
        RESUMABLE,
    }
)
_RETURNED = ("content-type", "retry-after", "cache-control", "x-accel-buffering", "www-authenticate")
_RETRIED = frozenset({500, 503})
_PREFIXES = {
    "/generate": "gnt-",
    "/v1/chat/completions": "chatcmpl-",
    "/v1/completions": "cmpl-",
    "/v1/responses": "resp-",
}
_ID = re.compile(r"[!-~]{1,256}")
BROKEN = "The worker ended before its answer was complete."
_ALPHABET = string.ascii_letters + string.digits


@dataclass(slots=True)
class Call:
    """One request of a client on its way."""

    request: web.Request
    context: RouterContext
    body: bytes
    head: Head
    request_id: str
    headers: dict[str, str]
    prompt: Prompt
    movement: Movement | None = None


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole answer of a worker."""

    status: int
    headers: dict[str, str]
    body: bytes


def request_id_of(request: web.Request, names: tuple[str, ...] = (REQUEST_ID,)) -> str:
    """The caller's id, or a new one with the prefix of the path: for none, and for one that no header can hold."""
    for name in names:
        given = request.headers.get(name, "")
        if _ID.fullmatch(given):
            return given
    return _PREFIXES.get(request.path, "req-") + "".join(random.choices(_ALPHABET, k=24))


def forwarded_headers(request: web.Request, request_id: str) -> dict[str, str]:
    """Headers that a worker gets."""
    headers = {name.lower(): value for name, value in request.headers.items()}
    listed = {name.strip().lower() for name in headers.get("connection", "").split(",")}
    kept = {name: value for name, value in headers.items() if name not in _DROPPED and name not in listed}
    kept[REQUEST_ID] = request_id
    caller = request.get(CALLER, NOBODY)
    if caller.replaces_key:  # a tenant's or an operator's key is not for workers
        kept.pop("x-api-key", None)
        kept.pop("authorization", None)
        if worker_key := request.app[CONTEXT].access.worker_key:
            kept["authorization"] = f"Bearer {worker_key}"
    kept["content-type"] = headers.get("content-type", "application/json")
    return kept


async def read_call(request: web.Request) -> Call:
    """Read a request of a client.

    Raises:
        RouterError: the body is too large or no JSON object.
    """
    context = request.app[CONTEXT]
    body = await request.read()
    request_id, head = request["request_id"], parse_head(body)
    prompt = Prompt(head.key, _routing_key(request))
    if context.kv_events.is_active:
        prompt = await context.prompt_tokens.add_to(prompt, request.path, head, body)
    return Call(request, context, body, head, request_id, forwarded_headers(request, request_id), prompt)


def _routing_key(request: web.Request) -> str | None:
    """The caller's own key for where it wants to be."""
    return next((request.headers[name] for name in _ROUTING_KEYS if request.headers.get(name)), None)


async def forward(request: web.Request) -> web.StreamResponse:
    """Pass a request to one worker of its model."""
    call = await read_call(request)
    if call.context.options.migrate_streams:
        call.movement = movement(request.path, call.head)
    return await Attempts(call).run()


class Attempts:
    """The attempts of one call. A worker is tried again only when no other one is left."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._tried: set[str] = set()
        self._reply: Reply | None = None
        self._error: RouterError | None = None

    async def run(self) -> web.StreamResponse:
        """The answer of the first worker that has one, or of the last."""
        call, options = self._call, self._call.context.options
        attempts = 1 if options.disable_retries else options.retry_max_retries
        for attempt in range(attempts):
            try:
                worker = self._choose()
            except RouterError as error:
                if attempt == 0:
                    raise
                self._error = self._error or error
                break
            if attempt:
                call.context.metrics.retries.inc()
                if worker.url in self._tried:
                    await asyncio.sleep(options.backoff(attempt, call.context.generator.random()))
            self._tried.add(worker.url)
            response = await self._send(worker)
            if response is not None:
                return response
        if self._reply is not None:
            return whole(self._reply, call.request_id)
        raise self._error or RouterError("internal_error", "No attempt was made.")

    def _choose(self) -> Worker:
        call = self._call
        workers = call.context.registry.of_model(call.head.model_name)
        regular = [worker for worker in workers if worker.role == "regular"]
        ready = usable(regular, call.context.now, "no_healthy_workers")
        fresh = [worker for worker in ready if worker.url not in self._tried] or ready
        return call.context.choose("regular", fresh, call.prompt)

    async def _send(self, worker: Worker) -> web.StreamResponse | None:
        """One attempt; None when another one may follow."""
        call, moving = self._call, self._call.movement
        body = call.body if moving is None else moving.body(call.body, call.head)
        try:
            async with Lease(call.context, worker) as lease:
                response, reply = await exchange(call, worker, body, lease, moving=moving)
        except RouterError as error:
            if error.code == "stale_request_expired":
                raise
            self._error, self._reply = error, None
            if error.code == "upstream_timeout" and not has_begun(moving):
                raise
            return None
        if response is not None:
            return response
        assert reply is not None
        if has_begun(moving):  # not what a stream that has begun can end with
            self._error = RouterError("upstream_unreachable", BROKEN)
            return None
        if reply.status in _RETRIED:
            self._reply = reply
            return None
        if reply.status < 400:
            call.context.policies["regular"].sent(worker, call.prompt)
        return whole(reply, call.request_id)


class Lease:
    """A worker's load and breaker while a request is there; says how it ended exactly once, whatever happens.

    Raises:
        RouterError: stale_request_expired when the lease ran out, breaker_open when another request has the probe.
    """

    def __init__(self, context: RouterContext, worker: Worker) -> None:
        self._context = context
        self._worker = worker
        self._lease = -1
        self._verdict: bool | None = None
        self._scope = asyncio.timeout(None)

    async def __aenter__(self) -> Lease:
        if not self._worker.breaker.acquire(self._context.now):
            raise RouterError("breaker_open", "All workers have failed lately and rest; try again later.")
        await self._scope.__aenter__()
        self._lease = self._context.leases.acquire(self._worker.index, self._context.now)
        self._context.scopes[self._lease] = self._scope
        self._worker.load += 1
        return self

    def judge(self, well: bool) -> None:
        """How the worker did; without a word the breaker learns nothing."""
        self._verdict = well

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        context, breaker = self._context, self._worker.breaker
        self._worker.load -= 1
        context.scopes.pop(self._lease, None)
        context.leases.release(self._lease)
        try:
            await self._scope.__aexit__(None if error is None else type(error), error, None)
        except TimeoutError:
            self._verdict = False
            context.metrics.stale.inc()
            raise RouterError("stale_request_expired", "The request was active for too long.") from None
        finally:
            if self._verdict is None:
                breaker.forget()
            elif self._verdict:
                breaker.succeed()
            else:
                breaker.fail(context.now)


async def exchange(
    call: Call,
    worker: Worker,
    body: bytes,
    lease: Lease,
    extra: dict[str, str] | None = None,
    whole_stream: bool = False,
    moving: Movement | None = None,
) -> tuple[web.StreamResponse | None, Reply | None]:
    """Send ``body`` to ``worker``: the streamed response, already sent, or the whole reply, not sent yet.

    ``extra`` are headers for the worker and the client; ``whole_stream`` reads streams like any other reply.

    Raises:
        RouterError: upstream_unreachable or upstream_timeout, before anything went to the client, or in the middle of a
            stream that can move.
    """
    timeout = call.context.options.request_timeout_secs
    headers = {**call.headers, **(extra or {})}
    if worker.api_key:
        headers["authorization"] = f"Bearer {worker.api_key}"
    if moving is not None:
        headers[RESUMABLE] = "1"
    try:
        async with asyncio.timeout(timeout) as limit:
            async with call.context.request(
                worker, "POST", call.request.path_qs, data=body, headers=headers
            ) as upstream:
                streamed = upstream.content_type == "text/event-stream" and upstream.status < 400
                if streamed and not whole_stream:
                    limit.reschedule(None)
                    if worker.role == "regular":
                        call.context.policies["regular"].sent(worker, call.prompt)
                    if moving is not None and (RESUMABLE in upstream.headers or has_begun(moving)):
                        return await _movable_stream(call, upstream, lease, moving), None
                    return await _stream(call, upstream, lease, extra), None
                data = await upstream.read()
                kept = {name: upstream.headers[name] for name in _RETURNED if name in upstream.headers}
                lease.judge(upstream.status < 500)
                return None, Reply(upstream.status, {**kept, **(extra or {})}, data)
    except TimeoutError:
        if not limit.expired():
            raise
        lease.judge(False)
        raise RouterError("upstream_timeout", f"The worker did not answer within {timeout:g} s.") from None
    except (aiohttp.ClientError, ConnectionError) as error:
        lease.judge(False)
        raise RouterError("upstream_unreachable", "The worker could not be reached.") from error


async def _begin_stream(call: Call, upstream: Upstream, extra: dict[str, str] | None) -> web.StreamResponse:
    """Status and headers of a stream go to the client."""
    kept = {name: upstream.headers[name] for name in _RETURNED if name in upstream.headers}
    response = web.StreamResponse(
        status=upstream.status, headers={**kept, REQUEST_ID: call.request_id, **(extra or {})}
    )
    await response.prepare(call.request)
    call.request["stream"] = response
    return response


async def _stream(call: Call, upstream: Upstream, lease: Lease, extra: dict[str, str] | None) -> web.StreamResponse:
    """Pass a stream on as it comes. One that breaks ends with an error event and without [DONE]."""
    response = await _begin_stream(call, upstream, extra)
    content = upstream.content
    idle = call.context.options.request_timeout_secs
    try:
        while True:
            async with asyncio.timeout(idle):
                data = await content.readany()
            if not data:
                break
            try:
                await response.write(data)
            except ConnectionError:
                return response  # the client is gone, which says nothing about the worker
    except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
        lease.judge(False)
        code = "upstream_timeout" if isinstance(error, TimeoutError) else "upstream_unreachable"
        return await end_stream(response, RouterError(code, BROKEN))
    lease.judge(True)
    with suppress(ConnectionError):
        await response.write_eof()
    return response


async def _movable_stream(call: Call, upstream: Upstream, lease: Lease, moving: Movement) -> web.StreamResponse:
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
    idle = call.context.options.request_timeout_secs
    try:
        while True:
            async with asyncio.timeout(idle):
                data = await upstream.content.readany()
            ready = moving.take(data) if data else moving.rest()
            if moving.failed:
                raise ConnectionError("the worker cannot go on")
            if ready:
                try:
                    await moving.response.write(ready)
                except ConnectionError:
                    return moving.response  # the client is gone
            if not data:
                break
    except (aiohttp.ClientError, ConnectionError, TimeoutError, ValueError) as error:
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
