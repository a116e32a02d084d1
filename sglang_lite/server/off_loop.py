"""Work that grows with the body of a request, away from the event loop when there is much of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from aiohttp import web

INLINE_BYTES = 16 * 1024
"""Bodies up to this size are worked on at once: that takes less time than waking a thread."""

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


async def off_loop(
    request: web.Request,
    work: Callable[_Parameters, _Result],
    *arguments: _Parameters.args,
    **options: _Parameters.kwargs,
) -> _Result:
    """``work(*arguments, **options)``, in a thread when the body of ``request``, which was read, is large."""
    if len(await request.read()) <= INLINE_BYTES:
        return work(*arguments, **options)
    return await asyncio.to_thread(work, *arguments, **options)
