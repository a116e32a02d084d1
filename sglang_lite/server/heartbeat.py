"""Whether the engine's loop still turns: a question about once a second, in the background.

A health check must answer at once even while a step takes seconds, so it looks at the last answer instead of asking.
"""

from __future__ import annotations

import asyncio
import logging

from sglang_lite.server.context import ServerContext
from sglang_lite.types import RequestError

logger = logging.getLogger(__name__)

INTERVAL = 1.0
ANSWER_TIMEOUT = 20.0
"""Seconds without an answer after which the engine counts as stuck. A long step delays the answer; it is no fault."""


async def watch_heartbeat(
    context: ServerContext, *, interval: float = INTERVAL, timeout: float = ANSWER_TIMEOUT
) -> None:
    """Keep ``context.is_responsive`` up to date, and end sessions whose time is over, until cancelled."""
    while True:
        try:
            await context.engine.ping(timeout)
            responsive = True
        except RequestError as error:
            responsive = False
            if context.is_responsive:
                logger.error("the engine does not answer: %s", error.message)
        if responsive and not context.is_responsive:
            logger.info("the engine answers again")
        context.is_responsive = responsive
        context.sessions.expire()
        await asyncio.sleep(interval)
