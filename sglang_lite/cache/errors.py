"""Errors of the page pool, the radix cache and their audit."""

from __future__ import annotations


class PoolExhausted(Exception):
    """An allocation asked for more pages than are free; nothing was taken.

    Args:
        requested: pages asked for.
        available: pages that were free.
    """

    def __init__(self, requested: int, available: int) -> None:
        super().__init__(
            f"page pool: {requested} pages requested, {available} free; evict cached pages or preempt a request"
        )
        self.requested = requested
        self.available = available


class PageAccountingError(Exception):
    """A page was given to an operation that its owner does not allow, for example a second release."""


class AuditError(AssertionError):
    """Pages or tree nodes contradict each other: a fault of this program, never of a request."""
