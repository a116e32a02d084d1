"""The other processes of one router: changes of the set of workers reach them all, in one order.

Each process also listens on a socket in a private directory. A change is made by process 0, whoever was asked for it,
and told to the others one after the other, with its number; who was away then asks for all (``sibling_workers``).
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
import msgspec
from aiohttp import web

from sglang_lite.router.errors import RouterError
from sglang_lite.router.shared_loads import SharedLoads

logger = logging.getLogger(__name__)

_SECONDS = 5.0
_HEADERS = ("authorization", "x-api-key", "content-type", "x-request-id")
_HOST = "http://sibling"
_REVISION = "x-sgl-revision"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Siblings:
    """What one process knows of the others.

    Attributes:
        number: of this process.
        loads: of workers, shared.
        is_new: the others were there before.
        revision: the last change of the set of workers that was made here.
        changing: held while a change is made, or all is asked for.
    """

    def __init__(self, directory: Path, number: int, loads: SharedLoads, *, is_new: bool) -> None:
        self.number = number
        self.loads = loads
        self.is_new = is_new
        self._directory = directory
        self.revision = -1 if is_new else 0
        self.changing = asyncio.Lock()
        self._sessions: dict[int, aiohttp.ClientSession] = {}

    @property
    def path(self) -> Path:
        """Socket of this process."""
        return self._socket(self.number)

    @property
    def others(self) -> list[int]:
        """Numbers of the others."""
        return [number for number in range(self.loads.processes) if number != self.number]

    @property
    def is_behind(self) -> bool:
        """Process 0 has made changes that were not made here."""
        return self.revision != self.loads.revision

    def _socket(self, number: int) -> Path:
        return self._directory / f"{number}.sock"

    async def change(self, request: web.Request, make: Handler) -> web.StreamResponse:
        """Make a change of the set of workers in all processes.

        Raises:
            RouterError: ``make`` raised it, or process 0 is just being started again.
        """
        if self.number and not is_sibling(request):
            return await self._pass_on(request)
        async with self.changing:
            response = await make(request)
            if self.number:
                self._note(request.headers.get(_REVISION, ""))
                return response
            self.loads.revision = self.revision = self.loads.revision + 1
            for number in self.others:
                try:
                    await self.call(number, request.method, request.path, request)
                except (aiohttp.ClientError, OSError, TimeoutError) as error:
                    logger.warning("process %d was not told of %s: %s", number, request.path, error)
            return response

    async def call(self, number: int, method: str, path: str, request: web.Request | None = None) -> tuple[int, bytes]:
        """Status and body of a call, with the body and the keys of ``request``.

        Raises:
            aiohttp.ClientError, OSError, TimeoutError: the process does not answer.
        """
        session = self._sessions.get(number)
        if session is None:
            connector = aiohttp.UnixConnector(path=str(self._socket(number)))
            session = self._sessions[number] = aiohttp.ClientSession(connector=connector)
        headers, data = {}, b""
        if request is not None:
            headers = {name: request.headers[name] for name in _HEADERS if name in request.headers}
            headers[_REVISION] = str(self.revision)
            data = await request.read()
        async with (
            asyncio.timeout(_SECONDS),
            session.request(method, _HOST + path, data=data or None, headers=headers) as answer,
        ):
            return answer.status, await answer.read()

    async def ask_all(self, path: str) -> list[bytes]:
        """Bodies of those that answer well."""

        async def ask(number: int) -> bytes | None:
            try:
                status, body = await self.call(number, "GET", path)
            except (aiohttp.ClientError, OSError, TimeoutError):
                return None
            return body if status == 200 else None

        return [body for body in await asyncio.gather(*map(ask, self.others)) if body is not None]

    async def close(self) -> None:
        """End the connections."""
        for session in self._sessions.values():
            await session.close()

    def _note(self, revision: str) -> None:
        """A change was made here; if the one before was not, all is asked for soon."""
        if revision == str(self.revision + 1):
            self.revision += 1

    async def _pass_on(self, request: web.Request) -> web.Response:
        try:
            status, body = await self.call(0, request.method, request.path, request)
        except (aiohttp.ClientError, OSError, TimeoutError):
            raise RouterError(
                "no_healthy_workers",
                "The router process that keeps the list of workers is being started again; try again in a second.",
            ) from None
        return web.Response(status=status, body=body, content_type="application/json")


def is_sibling(request: web.Request) -> bool:
    """Whether another process of this router asks: nobody else reaches its private directory."""
    connection = None if request.transport is None else request.transport.get_extra_info("socket")
    return connection is not None and connection.family == socket.AF_UNIX


class KnownWorker(msgspec.Struct, kw_only=True):
    """A worker as processes tell each other."""

    url: str
    role: str
    port: int | None = None
    api_key: str | None = None
    labels: dict[str, str] = msgspec.field(default_factory=dict)


class KnownWorkers(msgspec.Struct, kw_only=True):
    """All of them, behind a number of changes."""

    revision: int
    workers: list[KnownWorker]
