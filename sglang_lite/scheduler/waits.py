"""What the waiting queue waits for, and how long: one clock for all requests instead of one for each.

The head of the queue is what cannot start; everything behind it waits for the same thing. So the seconds are added up
by cause for the queue as a whole, once a plan, and a request's own share is the difference between two readings.
"""

from __future__ import annotations

from typing import Final

CAUSES: Final = ("step", "rows", "pages", "prefill_budget", "shared_prefix", "pause", "batching")
"""Why a request waits: for the end of the running step, a free row (``--max-running-requests``), KV pages, room among
the prompt tokens of a step, another prompt that computes the same prefix, the end of a pause, more requests to start
with (``--max-wait-ms``)."""

STEP: Final = 0
ROWS: Final = 1
PAGES: Final = 2
PREFILL_BUDGET: Final = 3
SHARED_PREFIX: Final = 4
PAUSE: Final = 5
BATCHING: Final = 6

Reading = tuple[float, ...]
"""Seconds by cause since the start, in the order of ``CAUSES``."""

NO_READING: Reading = (0.0,) * len(CAUSES)


class WaitClock:
    """Adds up the time of the queue by cause.

    Attributes:
        cause: what the queue waits for from now on, an index into ``CAUSES``.
    """

    __slots__ = ("_now", "_seconds", "cause")

    def __init__(self) -> None:
        self._seconds = [0.0] * len(CAUSES)
        self._now: float | None = None
        self.cause = STEP

    def advance(self, now: float) -> None:
        """The time until ``now`` belongs to the cause at hand."""
        if self._now is not None and now > self._now:
            self._seconds[self.cause] += now - self._now
        self._now = now

    def reading(self) -> Reading:
        """Seconds by cause at the last ``advance``."""
        return tuple(self._seconds)

    def since(self, earlier: Reading) -> dict[str, float]:
        """Seconds by the name of the cause since a reading; causes without any are left out."""
        spent = zip(CAUSES, self._seconds, earlier, strict=True)
        return {cause: seconds - before for cause, seconds, before in spent if seconds > before}
