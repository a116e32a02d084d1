"""Errors before any route is reached, as JSON: a request line or header that is none, an ``Expect`` nobody meets."""

from __future__ import annotations

from aiohttp import web

from sglang_lite.server.errors import http_error_body, json_response


class JsonErrorHandler(web.RequestHandler):
    """A connection whose own errors have the envelope of all others."""

    __slots__ = ()

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
        return await super().finish_response(request, resp, start_time)


class JsonErrorServer(web.Server):
    """Makes a handler of that kind for each connection."""

    handler_class: type[JsonErrorHandler] = JsonErrorHandler

    def __call__(self) -> web.RequestHandler:
        return self.handler_class(self, loop=self._loop, **self._kwargs)


class JsonErrorRunner(web.AppRunner):
    """Runs an application on connections of that kind."""

    server_class: type[JsonErrorServer] = JsonErrorServer

    async def _make_server(self) -> web.Server:
        server = await super()._make_server()
        # The library has no other place for a handler of one's own: an application makes its server itself.
        server.__class__ = self.server_class
        return server
