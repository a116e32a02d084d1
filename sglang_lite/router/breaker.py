"""A circuit breaker as a state machine: no I/O, and time is an argument."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class BreakerState(Enum):
    """Requests flow, none does, or one probes."""

    CLOSED = 0
    OPEN = 1
    HALF_OPEN = 2


@dataclass(frozen=True, slots=True)
class BreakerLimits:
    """When it opens and closes.

    Attributes:
        failures: consecutive failures that open it; 0 switches the breaker off.
        successes: probes in a row that close it again.
        cooldown: seconds from open to the first probe.
    """

    failures: int = 3
    successes: int = 1
    cooldown: float = 30.0


class Breaker:
    """One worker's breaker. A caller asks ``allows`` as often as it likes, ``acquire`` once for a request that it
    sends, and then says exactly once how that ended: ``succeed``, ``fail`` or ``forget``, and whether it was the probe.
    What was sent before the breaker opened says nothing about whether it may close, and does not end the probe."""

    __slots__ = ("_failures", "_limits", "_opened", "_probing", "_successes", "state")

    def __init__(self, limits: BreakerLimits) -> None:
        self._limits = limits
        self.state = BreakerState.CLOSED
        self._failures = 0
        self._successes = 0
        self._opened = 0.0
        self._probing = False

    def allows(self, now: float) -> bool:
        """Whether ``acquire`` would succeed. Asking changes nothing."""
        if self.state is BreakerState.CLOSED:
            return True
        if self.state is BreakerState.OPEN:
            return now - self._opened >= self._limits.cooldown
        return not self._probing

    def acquire(self, now: float) -> bool:
        """Admit a request. While half open there is one at a time, the probe."""
        if not self.allows(now):
            return False
        if self.state is not BreakerState.CLOSED:
            self.state = BreakerState.HALF_OPEN
            self._probing = True
        return True

    def succeed(self, is_probe: bool = True) -> None:
        """The body was delivered whole."""
        self._failures = 0
        if self.state is BreakerState.HALF_OPEN and is_probe:
            self._probing = False
            self._successes += 1
            if self._successes >= self._limits.successes:
                self.state = BreakerState.CLOSED
                self._successes = 0

    def fail(self, now: float, is_probe: bool = True) -> None:
        """The worker could not be reached, said 5xx or cut its body."""
        if not self._limits.failures or (self.state is BreakerState.HALF_OPEN and not is_probe):
            return
        self._failures += 1
        if self.state is BreakerState.HALF_OPEN or (
            self.state is BreakerState.CLOSED and self._failures >= self._limits.failures
        ):
            self.state = BreakerState.OPEN
            self._opened = now
            self._successes = 0
        if is_probe:
            self._probing = False

    def reset(self) -> None:
        """The worker is another process now."""
        self.state = BreakerState.CLOSED
        self._failures = self._successes = 0
        self._probing = False

    def forget(self, is_probe: bool = True) -> None:
        """The client left first: that says nothing about the worker, and the next request may probe."""
        if is_probe:
            self._probing = False
