"""Reading request bodies: not too large, not too slow."""

from __future__ import annotations

import asyncio

from aiohttp import web

from sglang_lite.frontend.request_limits import LIMITS
from sglang_lite.router.errors import RouterError
from sglang_lite.server.protocol_errors import take_body

BODY_SECONDS = LIMITS.body_seconds
"""Time in which a body must have come."""


async def read_body(request: web.Request) -> bytes:
    """The body, which ``request.read()`` then has at once.

    Raises:
        RouterError: payload_too_large (before it comes, where its length is told), request_timeout, or bad_request
            for one that breaks the protocol.
    """
    limit = request.client_max_size
    too_large = RouterError(
        "payload_too_large", f"The body may have {limit} bytes at most (--max-payload-size); send less at once."
    )
    if request.content_length is not None and request.content_length > limit:
        raise too_large
    try:
        await take_body(request)
        if request.content.is_eof():
            return await request.read()  # it came with the headers: there is nothing to wait for
        async with asyncio.timeout(BODY_SECONDS):
            return await request.read()
    except web.HTTPRequestEntityTooLarge:
        raise too_large from None
    except TimeoutError:
        raise RouterError(
            "request_timeout", f"The body did not arrive within {BODY_SECONDS:g} s; send it faster, or less of it."
        ) from None
    except web.RequestPayloadError:
        raise RouterError(
            "bad_request", "The body breaks the HTTP protocol: check its length, its chunks and its content encoding."
        ) from None
