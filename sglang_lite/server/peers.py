"""Several front processes on one port: a call that concerns all of them works whichever of them answers it.

Every front also listens on a socket in the private directory of the engine core, at which only its peers can call.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable

import aiohttp
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from sglang_lite.engine.carried_out import to_the_end
from sglang_lite.observability.merging import merge_metrics
from sglang_lite.server.protocol_errors import take_body
from sglang_lite.types import RequestError

ANSWER_SECONDS = 10.0
"""How long a peer may take: it is one turn of its event loop and one of the engine core."""

_EVERYWHERE = frozenset({"/abort_request", "/pause_generation", "/continue_generation"})
"""Calls that every front has to carry out: each knows only its own requests."""

_IN_TURN = frozenset({"/pause_generation", "/continue_generation"})
"""Those of which the last one counts: front 0 has them carried out one after the other, so that all fronts agree."""

_LEAD_HEADER = "x-sglang-lite-lead"
"""On a call to front 0 from a peer, which asks it to have the call carried out everywhere."""

_TURN_SECONDS = 60.0
"""How long such a call may wait for its turn and its end."""

_ALONE = frozenset(
    {
        "/load_lora_adapter",
        "/unload_lora_adapter",
        "/update_weights_from_disk",
        "/update_weight_version",
        "/open_session",
        "/close_session",
        "/release_memory_occupation",
        "/resume_memory_occupation",
        "/set_internal_state",
    }
)
"""Calls that change what fronts know of the engine, and that one front cannot tell the others."""

CONVERSATION = "/peer/conversations/"
"""Followed by the id of a stored response: what a request that continues it needs. Only peers may ask."""

_ELSEWHERE = ("/v1/requests/", "/v1/responses/")
"""What lies in the memory of the front that served it: when it is not here, it may be with a peer."""

_HOP_HEADERS = (_LEAD_HEADER, "host", "content-length", "connection", "transfer-encoding", "accept-encoding")


def socket_path(directory: str, front: int) -> str:
    """Where front number ``front`` hears its peers."""
    return f"{directory}/front-{front}.http"


class Peers:
    """The other fronts of one server.

    Args:
        directory: private directory of the engine core.
        front: number of this front.
        count: fronts in all.
    """

    def __init__(self, directory: str, front: int, count: int) -> None:
        self.directory = directory
        self.own_path = socket_path(directory, front)
        self._paths = [socket_path(directory, other) for other in range(count) if other != front]
        self.leader = None if front == 0 else socket_path(directory, 0)
        self.turn = asyncio.Lock()
        self._sessions: dict[str, aiohttp.ClientSession] = {}

    async def close(self) -> None:
        """End the connections to the peers."""
        await asyncio.gather(*(session.close() for session in self._sessions.values()))

    async def ask(self, request: web.Request, body: bytes) -> list[web.Response]:
        """The replies of all peers to the same call.

        Raises:
            RequestError: 503, one of them does not answer.
        """
        return list(await asyncio.gather(*(self._ask(path, request, body) for path in self._paths)))

    async def find(self, request: web.Request, path: str) -> bytes | None:
        """What the first peer that has something at ``path`` says, with the key of ``request``; None: nobody has.

        Raises:
            RequestError: 503, one of them does not answer.
        """
        replies = await asyncio.gather(*(self._ask(peer, request, b"", "GET", path) for peer in self._paths))
        found = (reply.body for reply in replies if reply.status == 200)
        return next((body for body in found if isinstance(body, bytes)), None)

    async def lead(self, leader: str, request: web.Request, body: bytes) -> web.Response:
        """The reply of front 0, which has all fronts carry out the call.

        Raises:
            RequestError: 503, it does not answer.
        """
        return await self._ask(leader, request, body, lead=True)

    async def _ask(
        self,
        path: str,
        request: web.Request,
        body: bytes,
        method: str | None = None,
        target: str | None = None,
        *,
        lead: bool = False,
    ) -> web.Response:
        session = self._sessions.get(path)
        if session is None:
            session = aiohttp.ClientSession(connector=aiohttp.UnixConnector(path))
            self._sessions[path] = session
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _HOP_HEADERS}
        if lead:
            headers[_LEAD_HEADER] = "1"
        timeout = aiohttp.ClientTimeout(total=_TURN_SECONDS if lead else ANSWER_SECONDS)
        try:
            url = f"http://peer{request.raw_path if target is None else target}"
            async with session.request(
                method or request.method, url, data=body or None, headers=headers, timeout=timeout
            ) as reply:
                content = await reply.read()
                kind = reply.headers.get("Content-Type", "application/json")
                return web.Response(body=content, status=reply.status, headers={"Content-Type": kind})
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise RequestError(
                f"another front process of this server does not answer: {type(error).__name__}", status=503
            ) from error


def is_from_peer(request: web.Request) -> bool:
    """Whether a peer asks, and not a client."""
    transport = request.transport
    connection = transport.get_extra_info("socket") if transport is not None else None
    return connection is not None and connection.family == socket.AF_UNIX


def peers_middleware(peers: Peers) -> Middleware:
    """A middleware that shares the calls that concern other fronts."""

    @web.middleware
    async def share(request: web.Request, handler: Handler) -> web.StreamResponse:
        path = request.path
        if is_from_peer(request) and _LEAD_HEADER not in request.headers:
            return await handler(request)
        if path in _ALONE:
            raise RequestError(f"{path} needs a server with one front process (--tokenizer-worker-num 1)", status=501)
        if path in _EVERYWHERE:
            await take_body(request)
            body = await request.read()
            return await to_the_end(_everywhere(request, body, handler, peers))
        if path.startswith(_ELSEWHERE):
            return await _here_or_there(request, handler, peers)
        if path.startswith("/metrics"):
            own = await handler(request)
            if not isinstance(own, web.Response) or not isinstance(own.body, bytes) or own.status != 200:
                return own
            others = [reply for reply in await peers.ask(request, b"") if reply.status == 200]
            merged = merge_metrics(
                [own.body, *(bytes(reply.body) for reply in others if isinstance(reply.body, bytes))]
            )
            return web.Response(body=merged, headers={"Content-Type": own.headers["Content-Type"]})
        return await handler(request)

    return share


async def _everywhere(request: web.Request, body: bytes, handler: Handler, peers: Peers) -> web.StreamResponse:
    if request.path not in _IN_TURN:
        return await _here_and_there(request, body, handler, peers)
    if peers.leader is not None:
        return await peers.lead(peers.leader, request, body)
    async with peers.turn:
        return await _here_and_there(request, body, handler, peers)


async def _here_and_there(request: web.Request, body: bytes, handler: Handler, peers: Peers) -> web.StreamResponse:
    own = await handler(request)
    return own if own.status >= 400 else _first_success([own, *await peers.ask(request, body)])


def _first_success(replies: Iterable[web.StreamResponse]) -> web.StreamResponse:
    """A reply that does not say that nothing was found, if there is one; an error of a peer comes before all."""
    known = list(replies)
    for reply in known:
        if reply.status >= 400:
            return reply
    for reply in known:
        if isinstance(reply, web.Response) and isinstance(reply.body, bytes) and b'"success":false' not in reply.body:
            return reply
    return known[0]


async def _here_or_there(request: web.Request, handler: Handler, peers: Peers) -> web.StreamResponse:
    await take_body(request)
    body = await request.read()
    missing: Exception | None = None
    own: web.StreamResponse | None = None
    try:
        own = await handler(request)
    except RequestError as error:
        if error.status != 404:
            raise
        missing = error
    if own is not None and own.status != 404:
        return own
    for reply in await peers.ask(request, body):
        if reply.status != 404:
            return reply
    if own is None:
        raise missing or RequestError("not found", status=404)
    return own
