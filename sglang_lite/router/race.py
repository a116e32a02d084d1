"""Two exchanges of one request, of which the one counts whose answer begins first.

The second one, the hedge, starts when nothing of the first has come for a while. Each runs in a task of its own and
says that its answer has begun before anything of it goes on (``Leg.claim``); in that moment the other one is cancelled.
Nothing here knows workers or sockets.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Generic, TypeVar

from sglang_lite.router.errors import RouterError

logger = logging.getLogger(__name__)

Outcome = TypeVar("Outcome")
FINAL = frozenset({"upstream_timeout", "stale_request_expired"})
"""Errors that end the request: its time is over."""


@dataclass(eq=False, slots=True)
class Leg:
    """One exchange of a race.

    Attributes:
        seconds: time that it has for a whole answer.
    """

    race: Race[Any]
    is_hedge: bool
    seconds: float

    def claim(self, status: int) -> None:
        """The answer has begun, with a status that is no failure; the other exchange ends, if this one counts.

        Raises:
            asyncio.CancelledError: the other one was first.
        """
        self.race.claim(self, status)


Send = Callable[[Leg], Coroutine[Any, Any, Outcome]]


class Race(Generic[Outcome]):
    """A request on its way to one worker, or two.

    Args:
        first: the exchange with the worker that was chosen. One that ends without a claim has failed.
        second: called once when the hedge is due: its exchange, or None for no hedge.
        seconds: time to a whole answer, for both together.
        began: called when the answer begins, with whether it is that of the hedge.

    Attributes:
        result: how the hedge ended (``won``, ``lost``, ``failed``, ``abandoned``); None without one.
    """

    def __init__(
        self,
        first: Send[Outcome],
        second: Callable[[], Send[Outcome] | None],
        seconds: float,
        began: Callable[[bool], None],
    ) -> None:
        self._send = first
        self._second = second
        self._seconds = seconds
        self._began = began
        self._started = 0.0
        self._first: asyncio.Task[Outcome] | None = None
        self._hedge: asyncio.Task[Outcome] | None = None
        self._winner: Leg | None = None
        self.result: str | None = None

    async def run(self, delay: float | None) -> Outcome:
        """The outcome that counts; both exchanges have ended then. ``delay`` is the time to the hedge, None for never.

        Raises:
            RouterError: the exchange that counts, or the last of two that failed, ended with it.
        """
        loop = asyncio.get_running_loop()
        self._started = loop.time()
        first = self._first = loop.create_task(self._send(Leg(self, False, self._seconds)))
        timer = None if delay is None else loop.call_later(delay, self.fire)
        try:
            await asyncio.wait({first})  # it ends when the hedge wins, too
            if self._hedge is not None and self._goes_on_with_hedge(first):
                return await self._hedge
            return first.result()
        finally:
            if timer is not None:
                timer.cancel()
            self.result = self._result_of_hedge()
            await self._end()

    def fire(self) -> None:
        """The first one takes too long: the hedge starts, where there is one."""
        assert self._first is not None
        loop = asyncio.get_running_loop()
        left = self._seconds - (loop.time() - self._started)
        if self._hedge is not None or self._winner is not None or self._first.done() or left <= 0:
            return
        send = self._second()
        if send is not None:
            self._hedge = loop.create_task(send(Leg(self, True, left)))

    def claim(self, leg: Leg, status: int) -> None:
        """See ``Leg.claim``. A hedge's refusal counts only once the first one has failed: what one worker refuses
        another one may do, and a request is not to fare worse for having been sent to two."""
        if self._winner is not None:
            raise asyncio.CancelledError
        assert self._first is not None
        if leg.is_hedge and status >= HTTPStatus.BAD_REQUEST and not self._first.done():
            return
        self._winner = leg
        loser = self._first if leg.is_hedge else self._hedge
        if loser is not None:
            loser.cancel()
        self._began(leg.is_hedge)

    def _goes_on_with_hedge(self, first: asyncio.Task[Outcome]) -> bool:
        """Whether the first one, which has ended, lost or failed in a way that another worker may do better in."""
        if self._winner is not None:
            return self._winner.is_hedge
        error = first.exception()
        return error is None or (isinstance(error, RouterError) and error.code not in FINAL)

    def _result_of_hedge(self) -> str | None:
        if self._hedge is None:
            return None
        if self._winner is not None and self._winner.is_hedge:
            return "won"
        if self._hedge.done() and not self._hedge.cancelled():
            return "failed"
        return "abandoned" if self._winner is None else "lost"

    async def _end(self) -> None:
        """Nothing goes on behind the race, whatever ended it."""
        tasks = [task for task in (self._first, self._hedge) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        hedge = self._hedge
        if hedge is not None and self.result != "won" and not hedge.cancelled():
            error = hedge.exception()
            if error is not None and not isinstance(error, RouterError):
                logger.error("fault of a hedge", exc_info=error)  # nobody else hears of it
