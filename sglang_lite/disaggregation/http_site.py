"""A small HTTP service on a port of its own, and the readers of its inputs."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

import msgspec
from aiohttp import web

T = TypeVar("T")

_IDLE_SECONDS = 75.0
_BODY_SECONDS = 60.0
"""What a connection without a request, and a body, may take: each holds a file descriptor meanwhile."""


class HttpSite:
    """Serves an application between ``start`` and ``stop``.

    Args:
        port: 0 for any.
    """

    def __init__(self, app: web.Application, host: str, port: int) -> None:
        self._app = app
        self._host = host
        self._wanted = port
        self._runner: web.AppRunner | None = None
        self.port = port

    async def start(self) -> None:
        """Listen.

        Raises:
            OSError: the port is taken, or the address is not of this machine.
        """
        runner = web.AppRunner(
            self._app, access_log=None, handle_signals=False, shutdown_timeout=0.5, keepalive_timeout=_IDLE_SECONDS
        )
        await runner.setup()
        try:
            await web.TCPSite(runner, self._host, self._wanted).start()
        except OSError:
            await runner.cleanup()
            raise
        self._runner = runner
        self.port = runner.addresses[0][1]

    @property
    def server(self) -> web.Server | None:
        """Of its connections; None while it does not serve."""
        return None if self._runner is None else self._runner.server

    async def stop(self) -> None:
        """Stop listening; may be called again."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await asyncio.shield(runner.cleanup())


async def read_json(request: web.Request, kind: type[T]) -> T:
    """The body as ``kind``.

    Raises:
        web.HTTPBadRequest: it is not.
        web.HTTPRequestTimeout: it does not come to its end.
    """
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            body = await request.read()
        return msgspec.json.decode(body, type=kind)
    except TimeoutError as error:
        raise web.HTTPRequestTimeout(text=f"{request.method} {request.path}: the body took too long") from error
    except msgspec.MsgspecError as error:
        raise web.HTTPBadRequest(text=f"{request.method} {request.path}: {error}") from error


def read_number(request: web.Request, name: str) -> int:
    """A number of the query.

    Raises:
        web.HTTPBadRequest: it is missing or none.
    """
    try:
        return int(request.query[name])
    except (KeyError, ValueError) as error:
        raise web.HTTPBadRequest(text=f"{request.path}: the query needs {name}, a whole number") from error


async def answer_ok(request: web.Request) -> web.Response:
    """``GET /health``."""
    del request
    return web.Response(text="OK")


def json_response(content: dict[str, Any], status: int = 200) -> web.Response:
    """A JSON answer."""
    return web.Response(body=msgspec.json.encode(content), status=status, content_type="application/json")
