"""``GET /``: a page to talk to the model and to watch the server. Static files of the package, no build step."""

from __future__ import annotations

from pathlib import Path

from aiohttp import web

_FOLDER = Path(__file__).parent / "playground"
_TYPES = {"index.html": "text/html", "style.css": "text/css"}
_SCRIPTS = ("main.js", "events.js", "server.js")
# Scripts and calls of this server only: what a model writes is shown as text and can never run.
_POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'"
_HEADERS = {
    "Content-Security-Policy": f"{_POLICY}; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}

PATHS = ("/", "/playground/style.css", *(f"/playground/{name}" for name in _SCRIPTS))
"""What the page consists of. It holds no secret; the calls that it makes need the key that the user types in."""


def _read(name: str) -> bytes:
    return (_FOLDER / name).read_bytes()


def add_playground_routes(app: web.Application) -> None:
    """Register the routes of this module.

    Tools that look for a runtime ask ``/`` for a greeting; only a browser, which accepts HTML, gets the page.
    """
    files = {name: _read(name) for name in (*_TYPES, *_SCRIPTS)}

    async def root(request: web.Request) -> web.Response:
        if "text/html" not in request.headers.get("Accept", ""):
            return web.json_response("SGLang is running", headers={"Vary": "Accept"})
        body = files["index.html"]
        return web.Response(
            body=body, content_type="text/html", charset="utf-8", headers={**_HEADERS, "Vary": "Accept"}
        )

    async def asset(request: web.Request) -> web.Response:
        name = request.path.rpartition("/")[2]
        kind = _TYPES.get(name, "text/javascript")
        return web.Response(body=files[name], content_type=kind, charset="utf-8", headers=_HEADERS)

    app.router.add_get("/", root)
    for path in PATHS[1:]:
        app.router.add_get(path, asset)
