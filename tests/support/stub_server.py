"""A server without an engine for tests of fleets: health, introduction, slow answers, and an end that drains.

``python -m tests.support.stub_server --host H --port P [--exit N] [--slow SECONDS]``; other options are taken and
forgotten. ``--exit`` leaves at once with that code.
"""

from __future__ import annotations

import argparse
import asyncio
import sys

from aiohttp import web


def make_app(slow: float) -> web.Application:
    """Answers of ``/generate`` take ``slow`` seconds."""

    async def fine(request: web.Request) -> web.Response:
        return web.json_response({})

    async def info(request: web.Request) -> web.Response:
        return web.json_response({"served_model_name": "stub", "disaggregation_mode": "null"})

    async def generate(request: web.Request) -> web.Response:
        await asyncio.sleep(slow)
        return web.json_response({"text": "done"})

    app = web.Application()
    app.router.add_get("/health", fine)
    app.router.add_get("/server_info", info)
    app.router.add_post("/generate", generate)
    return app


def main() -> None:
    """Serve until SIGTERM, then end what runs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--exit", type=int)
    parser.add_argument("--slow", type=float, default=0.02)
    given, _ = parser.parse_known_args()
    if given.exit is not None:
        sys.exit(given.exit)
    web.run_app(make_app(given.slow), host=given.host, port=given.port, shutdown_timeout=10, print=None)


if __name__ == "__main__":
    main()
