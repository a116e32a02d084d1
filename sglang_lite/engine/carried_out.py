"""Changes of a running server that are carried out to their end, whoever leaves meanwhile."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

from sglang_lite.types import RequestError

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

_UNDER_WAY: set[asyncio.Task[Any]] = set()
"""The event loop keeps no reference to a task."""


async def to_the_end(change: Coroutine[Any, Any, Result]) -> Result:
    """Wait for ``change``. When the caller is cancelled, the change goes on without it.

    A client that hangs up or runs out of patience cancels its call. Half of a change would leave the front with another
    idea of the engine than the engine's own: weights, adapters and pauses that are there and that nobody knows of.

    Raises:
        Whatever ``change`` raises, while its caller is there; afterwards it is logged.
    """
    task = asyncio.create_task(change)
    _UNDER_WAY.add(task)
    task.add_done_callback(_UNDER_WAY.discard)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.add_done_callback(_report)
        raise


def _report(task: asyncio.Task[Any]) -> None:
    error = None if task.cancelled() else task.exception()
    if error is not None:
        known = isinstance(error, RequestError | ConnectionError)
        logger.warning("a change whose caller had left failed: %s", error, exc_info=None if known else error)
