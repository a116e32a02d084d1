"""Closing connections on which no whole request header arrives: each would hold a file descriptor for ever.

Later requests of a connection are under ``LIMITS.idle_seconds``, which aiohttp keeps, and bodies under
``LIMITS.body_seconds``.
"""

from __future__ import annotations

import asyncio
import logging
import resource

from aiohttp import web

from sglang_lite.frontend.request_limits import LIMITS

logger = logging.getLogger(__name__)

_MOST_FILES = 2**20


async def close_silent_clients(server: web.Server, limit: float = LIMITS.header_seconds) -> None:
    """Close connections that have not sent their first header ``limit`` to twice ``limit`` seconds after they opened.

    Runs until it is cancelled.
    """
    silent: set[web.RequestHandler] = set()
    while True:
        await asyncio.sleep(limit)
        # The handler has no public count of its requests, and a middleware would cost every request something.
        now = {connection for connection in server.connections if not connection._request_count}
        stale = silent & now
        for connection in stale:
            connection.force_close()
        if stale:
            logger.warning("closed %d connections without a request header for %g s", len(stale), limit)
        silent = now - stale


def raise_file_limit() -> None:
    """Allow as many open files as the system lets this process have: every connection is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
