"""Errors before any route is reached, as JSON: a request line or header that is none, an ``Expect`` nobody meets.

And what a client hears that asks with ``Expect: 100-continue`` before it sends its body: 100 once the body is wanted,
or what it would get in any case, as for a wrong key. The library says 100 before any of the application's code runs.
"""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import hdrs, web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http import HttpVersion11, RawRequestMessage
from multidict import CIMultiDict, CIMultiDictProxy

from sglang_lite.server.errors import http_error_body, json_response


async def take_body(request: web.BaseRequest) -> None:
    """To be called before a body is read: a client that waits for it gets leave to send it."""
    connection = request.protocol
    if isinstance(connection, JsonErrorHandler) and connection.holds:
        connection.holds = False
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # not a part of the answer


class JsonErrorHandler(web.RequestHandler):
    """A connection whose own errors have the envelope of all others.

    Attributes:
        holds: the client of the request at hand waits for leave to send the body.
    """

    __slots__ = ("holds",)

    def __init__(self, manager: web.Server, **options: Any) -> None:
        super().__init__(manager, **options)
        self.holds = False

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        super().handle_error(request, status, exc, message)  # it logs, and closes what has been answered in part
        lines = (message or "").strip().splitlines()
        text = "Internal server error" if status >= 500 else lines[0].rstrip(":") if lines else "Bad Request"
        response = self.answer(request.path, status, text)
        response.force_close()
        return response

    def answer(self, path: str, status: int, message: str) -> web.Response:
        """The error as an answer."""
        return json_response(http_error_body(path, message, status, str(status)), status)

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        if isinstance(resp, web.HTTPException):  # raised outside of all middlewares
            resp = self.answer(request.path, resp.status, resp.reason)
        if self.holds:
            self.holds = False
            resp.force_close()  # what comes next could be the body or another request
        if hdrs.CONTENT_ENCODING in request.headers and not request.content.is_eof():
            # The library would unpack what is left, to throw it away: a thousand times as much work as to send it.
            self._lingering_time = 0.0
            resp.force_close()
        return await super().finish_response(request, resp, start_time)


class JsonErrorServer(web.Server):
    """Makes a handler of that kind for each connection."""

    handler_class: type[JsonErrorHandler] = JsonErrorHandler

    def hold_bodies(self) -> None:
        """Clients that ask for leave to send a body get it from ``take_body`` only."""
        make_request = self.request_factory

        def make(
            message: RawRequestMessage,
            payload: Any,
            connection: web.RequestHandler,
            writer: AbstractStreamWriter,
            task: asyncio.Task[None],
        ) -> web.BaseRequest:
            expected = message.headers.get(hdrs.EXPECT)
            if expected is not None and expected.lower() == "100-continue" and message.version == HttpVersion11:
                headers = CIMultiDict(message.headers)
                del headers[hdrs.EXPECT]  # the library would answer it
                message = message._replace(headers=CIMultiDictProxy(headers))
                if isinstance(connection, JsonErrorHandler):
                    connection.holds = True
            return make_request(message, payload, connection, writer, task)

        self.request_factory = make

    def __call__(self) -> web.RequestHandler:
        return self.handler_class(self, loop=self._loop, **self._kwargs)


class JsonErrorRunner(web.AppRunner):
    """Runs an application on connections of that kind. Whoever reads a body there calls ``take_body`` before."""

    server_class: type[JsonErrorServer] = JsonErrorServer

    async def _make_server(self) -> web.Server:
        server = await super()._make_server()
        # The library has no other place for a handler of one's own: an application makes its server itself.
        server.__class__ = self.server_class
        if isinstance(server, JsonErrorServer):
            server.hold_bodies()
        return server
