"""Whether the engine's loop still turns: a question about once a second, in the background.

A health check must answer at once even while a step takes seconds, so it looks at the last answer instead of asking.
"""

from __future__ import annotations

import asyncio

from sglang_lite.engine.pulse import LOOK_SECONDS
from sglang_lite.server.context import ServerContext


async def watch_heartbeat(context: ServerContext, *, interval: float = LOOK_SECONDS) -> None:
    """Keep ``context.is_responsive`` up to date, and end sessions whose time is over, until cancelled."""
    while True:
        context.is_responsive = context.engine.look()
        context.sessions.expire()
        await asyncio.sleep(interval)
