"""HTTP beside gRPC: ``/metrics`` and the profile, for programs that speak no gRPC."""

from __future__ import annotations

from aiohttp import web
from multidict import CIMultiDict

from sglang_lite.rpc.inner import HOP_HEADERS, Inner

_BODY_BYTES = 1024 * 1024
_ROUTES = (("GET", "/metrics"), ("POST", "/start_profile"), ("POST", "/stop_profile"))


def make_sidecar(inner: Inner) -> web.Application:
    """An application with the routes of the sidecar; the server's own HTTP application answers them."""

    async def answer(request: web.Request) -> web.Response:
        headers = CIMultiDict(
            (name, value)
            for name, value in request.headers.items()
            if name.lower() not in HOP_HEADERS and not name.lower().startswith("content-")
        )
        body = await request.read() or None
        reply = await inner.call(request.method, request.rel_url.raw_path_qs, body, headers)
        return web.Response(status=reply.status, body=reply.body, headers={"Content-Type": reply.content_type_line})

    app = web.Application(client_max_size=_BODY_BYTES)
    for method, path in _ROUTES:
        app.router.add_route(method, path, answer)
    return app
