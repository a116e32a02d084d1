"""How long a server that ends waits for the requests that it has."""

from __future__ import annotations

import asyncio
from typing import Any

from sglang_lite.server.context import ServerContext
from sglang_lite.types import RequestError

PREFILL_PATIENCE = 2.0
"""Seconds without progress after which a prefill server gives up: its partners have to hear of its end soon."""

_LOOK_SECONDS = 0.25


async def wait_for_requests(context: ServerContext, timeout: float) -> None:
    """Until nothing is in flight, or for ``timeout`` seconds.

    Requests of a prefill server wait for others, who may never come: it waits only while something moves.
    """
    if context.config.disaggregation_mode != "prefill":
        await wait_idle(context, timeout)
        return
    loop = asyncio.get_running_loop()
    changed = loop.time()
    until = changed + timeout
    known: Any = None
    while not context.idle.is_set() and (left := until - loop.time()) > 0:
        progress = await _progress(context, left)
        now = loop.time()
        if progress != known:
            known, changed = progress, now
        elif now - changed >= PREFILL_PATIENCE:
            return
        await wait_idle(context, min(_LOOK_SECONDS, left))


async def wait_idle(context: ServerContext, timeout: float) -> None:
    """Until nothing is in flight, or for ``timeout`` seconds."""
    try:
        async with asyncio.timeout(timeout):
            await context.idle.wait()
    except TimeoutError:
        pass


async def _progress(context: ServerContext, seconds: float) -> Any:
    """What changes as long as prompts are computed and pages move."""
    try:
        async with asyncio.timeout(seconds):
            loads = [load for _, load in await context.engine.replica_loads()]
    except (TimeoutError, RequestError):
        loads = []
    if any(load.num_prefilling and not load.paused for load in loads):
        return object()  # unlike any other: one step may take longer than the patience, and the core answers meanwhile
    moved = [
        (load.transfers.by_state, load.transfers.spans, load.transfers.bytes, load.transfers.transfers)
        for load in loads
        if load.transfers is not None
    ]
    return context.requests_in_flight, [load.steps for load in loads], moved
