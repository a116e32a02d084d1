"""Cross-origin calls from the origins of ``--cors-allowed-origins``; without the option, none."""

from __future__ import annotations

from aiohttp import web

_METHODS = "DELETE, GET, HEAD, OPTIONS, POST, PUT"
_EXPOSED = "x-request-id, x-router-error-code, retry-after"
_SECONDS = "600"


class CrossOrigin:
    """What browsers are told.

    Args:
        origins: allowed ones; ``*`` allows all.
    """

    def __init__(self, origins: tuple[str, ...]) -> None:
        self._all = "*" in origins
        self._origins = frozenset(origin.rstrip("/") for origin in origins)

    def __bool__(self) -> bool:
        return bool(self._origins)

    def preflight(self, request: web.Request) -> web.Response | None:
        """The answer to a browser that asks before it calls; None for any other request.

        An origin that is not allowed gets the answer without the headers that would allow it.
        """
        if not self or request.method != "OPTIONS" or "Access-Control-Request-Method" not in request.headers:
            return None
        asked = request.headers.get("Access-Control-Request-Headers", "")
        headers = {
            "Access-Control-Allow-Methods": _METHODS,
            "Access-Control-Allow-Headers": asked if asked and asked.isascii() else "*",
            "Access-Control-Max-Age": _SECONDS,
        }
        return web.Response(status=204, headers=headers if self._allows(request) else None)

    async def on_prepare(self, request: web.Request, response: web.StreamResponse) -> None:
        """Signal handler of the application: name the origin in every answer, streams and errors included."""
        if not self:
            return
        response.headers["Vary"] = "Origin"
        if self._allows(request):
            response.headers["Access-Control-Allow-Origin"] = "*" if self._all else request.headers["Origin"]
            response.headers["Access-Control-Expose-Headers"] = _EXPOSED

    def _allows(self, request: web.Request) -> bool:
        origin = request.headers.get("Origin", "")
        return bool(origin) and (self._all or origin in self._origins)
