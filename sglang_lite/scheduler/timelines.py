"""Where the time of a request went, noted when it starts, when its prompt is computed and when it ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_lite.scheduler.waits import Reading, WaitClock
from sglang_lite.types import RequestTimeline

if TYPE_CHECKING:
    from sglang_lite.scheduler.request import Request


class Timeline:
    """The record of one live request, written a few times in its life and never for a token.

    Attributes:
        queued_at, reading: when it last began to wait, and the clock of the queue then.
        guessed: see ``RequestTimeline``.
    """

    __slots__ = (
        "_chunks",
        "_computed",
        "_prefill_seconds",
        "_queue_seconds",
        "_requeue_seconds",
        "_started_at",
        "_waits",
        "guessed",
        "queued_at",
        "reading",
    )

    def __init__(self, now: float, reading: Reading) -> None:
        self.queued_at = now
        self.reading = reading
        self._started_at: float | None = None
        self._queue_seconds = 0.0
        self._requeue_seconds = 0.0
        self._prefill_seconds = 0.0
        self._waits: dict[str, float] = {}
        self._chunks = 0
        self._computed = 0
        self.guessed: list[int] = []

    def queue(self, now: float, clock: WaitClock) -> None:
        """It waits again, after a preemption."""
        self._leave_prefill(now)
        clock.advance(now)
        self.queued_at, self.reading = now, clock.reading()

    def start(self, now: float, clock: WaitClock, *, first: bool) -> None:
        """It runs from now on; ``first`` tells the first time from a resumption."""
        waited = max(0.0, now - self.queued_at)
        if first:
            self._queue_seconds = waited
        else:
            self._requeue_seconds += waited
        for cause, seconds in clock.since(self.reading).items():
            self._waits[cause] = self._waits.get(cause, 0.0) + seconds
        self._started_at = now

    def add_chunk(self, num_tokens: int) -> None:
        """A part of its prompt was computed."""
        self._chunks += 1
        self._computed += num_tokens

    def add_guesses(self, tally: list[int]) -> None:
        """It leaves its row, where this became of its guesses."""
        self.guessed = [one + more for one, more in zip(self.guessed or [0] * len(tally), tally, strict=True)]

    def prefilled(self, now: float) -> None:
        """All known tokens are computed, and the next one is drawn."""
        self._leave_prefill(now)

    def _leave_prefill(self, now: float) -> None:
        if self._started_at is not None:
            self._prefill_seconds += max(0.0, now - self._started_at)
            self._started_at = None

    def record(self, request: Request, now: float, clock: WaitClock) -> RequestTimeline:
        """What there is to say at ``now``; a wait that is still going on counts."""
        queue_seconds, requeue_seconds, waits = self._queue_seconds, self._requeue_seconds, self._waits
        prefill_seconds = self._prefill_seconds
        if request.waiting:
            waited = max(0.0, now - self.queued_at)
            queue_seconds += waited if request.started is None else 0.0
            requeue_seconds += waited if request.started is not None else 0.0
            clock.advance(now)
            running = clock.since(self.reading)
            waits = {cause: waits.get(cause, 0.0) + running.get(cause, 0.0) for cause in {**waits, **running}}
        elif self._started_at is not None:
            prefill_seconds += max(0.0, now - self._started_at)
        return RequestTimeline(
            queue_seconds=queue_seconds,
            requeue_seconds=requeue_seconds,
            waits=dict(waits),
            prefill_seconds=prefill_seconds,
            prefill_chunks=self._chunks,
            computed_tokens=self._computed,
            cached_tokens=max(request.cached_tokens, 0),
            preemptions=request.retractions,
            guessed=self.guessed,
        )
