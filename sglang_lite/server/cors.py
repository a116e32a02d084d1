"""Cross-origin calls: every origin, method and header is allowed, with credentials."""

from __future__ import annotations

from aiohttp import web
from aiohttp.typedefs import Handler


def _echo(request: web.Request, name: str) -> str | None:
    """A header that can be sent back: bytes beyond ASCII could not be written into a reply."""
    value = request.headers.get(name)
    return value if value is not None and value.isascii() else None


@web.middleware
async def preflight_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer a browser's preflight request."""
    if request.method != "OPTIONS" or "Access-Control-Request-Method" not in request.headers:
        return await handler(request)
    return web.Response(
        headers={
            "Access-Control-Allow-Methods": "DELETE, GET, HEAD, OPTIONS, PATCH, POST, PUT",
            "Access-Control-Allow-Headers": _echo(request, "Access-Control-Request-Headers") or "*",
            "Access-Control-Max-Age": "600",
        }
    )


async def add_origin_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Signal handler: name the caller's origin, which credentials need instead of a star."""
    origin = _echo(request, "Origin")
    if origin is not None:
        response.headers["Access-Control-Allow-Origin"] = origin
        response.headers["Access-Control-Allow-Credentials"] = "true"
        response.headers["Vary"] = "Origin"
