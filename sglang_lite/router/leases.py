"""Active load of workers, counted by leases that expire: no I/O, and time is an argument."""

from __future__ import annotations


class LeaseTable:
    """One lease for each request that a worker has.

    Args:
        timeout: seconds after which a lease is stale.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._next = 0
        self._leases: dict[int, tuple[int, float]] = {}  # in the order of their start, as dictionaries are
        self._loads: dict[int, int] = {}

    def acquire(self, worker: int, now: float) -> int:
        """A lease on ``worker``; ``now`` must not decrease from call to call."""
        lease = self._next
        self._next += 1
        self._leases[lease] = (worker, now + self._timeout)
        self._loads[worker] = self._loads.get(worker, 0) + 1
        return lease

    def release(self, lease: int) -> bool:
        """End a lease; False when it had ended before."""
        entry = self._leases.pop(lease, None)
        if entry is None:
            return False
        worker = entry[0]
        left = self._loads[worker] - 1
        if left:
            self._loads[worker] = left
        else:
            del self._loads[worker]
        return True

    def expire(self, now: float) -> list[int]:
        """End all stale leases and return them."""
        stale = []
        for lease, (_, deadline) in self._leases.items():
            if deadline > now:
                break
            stale.append(lease)
        for lease in stale:
            self.release(lease)
        return stale

    def load(self, worker: int) -> int:
        """Leases on ``worker``."""
        return self._loads.get(worker, 0)

    @property
    def total(self) -> int:
        """All leases."""
        return len(self._leases)
