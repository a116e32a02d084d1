"""How the task that reads one request waits for news: a flag, not a queue.

Snapshots are cumulative, so news that arrive while the reader is busy need no room: its next look shows all of it.
"""

from __future__ import annotations

import asyncio


class RequestReader:
    """Wakes the one task that reads a request. Lives in that task's event loop."""

    __slots__ = ("_loop", "_waiter", "_woken")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self._woken = False

    def notify(self) -> None:
        """There is something new to look at."""
        self._woken = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self) -> None:
        """Return when there is something new since the last return."""
        if not self._woken:
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self._woken = False
