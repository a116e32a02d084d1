"""Fair shares between tenants: a counter of what each was served, and the one served least goes first.

The virtual token counter of "Fairness in Serving Large Language Models" (OSDI 2024): a tenant is charged for the
prompt tokens computed for it and, more, for every token it draws, divided by its weight. A tenant that comes back
after a pause starts at the level of the others, so that nobody saves up service. Between two tenants that both have
requests waiting all the time, the charged service differs by a bound that does not grow with time.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sglang_lite.types import Int32Array

PROMPT_PRICE = 1.0
OUTPUT_PRICE = 2.0
"""Price of a token: drawing one takes a pass of its own, computing a prompt token shares one."""

_FIRST_CAPACITY = 16


class TenantCounters:
    """Tenants by slot: names, weights and the counters as columns.

    Attributes:
        served: float64[capacity], charged tokens over the weight. Only differences mean something.
        waiting: int64[capacity], waiting requests.
    """

    def __init__(self) -> None:
        self._slots: dict[str, int] = {}
        self._free: list[int] = []
        self._weights: npt.NDArray[np.float64] = np.ones(0)
        self._running: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self.served: npt.NDArray[np.float64] = np.zeros(0)
        self.waiting: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self._last_level = 0.0

    def __len__(self) -> int:
        return len(self._slots)

    def slot(self, name: str, weight: float) -> int:
        """The slot of a tenant; its weight is the newest one given."""
        slot = self._slots.get(name)
        if slot is None:
            if not self._free:
                self._make_room()
            slot = self._slots[name] = self._free.pop()
            self.served[slot] = 0.0
        self._weights[slot] = weight
        return slot

    def arrive(self, slot: int) -> None:
        """A request of the tenant waits (for the first time, or again)."""
        if not self.waiting[slot]:
            others = self.served[self.waiting > 0]
            level = float(others.min()) if len(others) else self._last_level
            self.served[slot] = max(self.served[slot], level)
        self.waiting[slot] += 1

    def leave(self, slot: int) -> None:
        """A waiting request of the tenant runs, or ended."""
        self.waiting[slot] -= 1
        if not self.waiting.any():
            self._last_level = max(self._last_level, float(self.served[slot]))

    def start(self, slot: int, prompt_tokens: int) -> None:
        """A request runs, and so many prompt tokens are going to be computed for it."""
        self._running[slot] += 1
        self.served[slot] += PROMPT_PRICE * prompt_tokens / self._weights[slot]

    def stop(self, slot: int) -> None:
        """It runs no longer."""
        self._running[slot] -= 1

    def charge_outputs(self, slots: Int32Array) -> None:
        """Every row of a step draws a token; ``slots`` names the tenant of each: int32[n]."""
        self.served += np.bincount(slots, minlength=len(self.served)) * (OUTPUT_PRICE / self._weights)

    def charge(self, slot: int, outputs: int) -> None:
        """The tenant drew so many tokens."""
        self.served[slot] += OUTPUT_PRICE * outputs / self._weights[slot]

    def least_served(self) -> int:
        """The waiting tenant whose turn it is."""
        return int(np.argmin(np.where(self.waiting > 0, self.served, np.inf)))

    def heaviest(self) -> int:
        """The tenant with the most waiting requests for its weight."""
        return int(np.argmax(self.waiting / self._weights))

    def crowds_out(self, slot: int) -> bool:
        """Whether another tenant fills the queue beyond its share while ``slot`` has less than its own."""
        other = self.heaviest()
        mine = (self.waiting[slot] + 1) / self._weights[slot]
        return other != slot and bool(self.waiting[other] / self._weights[other] > mine)

    def _make_room(self) -> None:
        """Forget the tenants of whom nothing is here; grow when that frees little."""
        gone = [name for name, slot in self._slots.items() if not self.waiting[slot] and not self._running[slot]]
        # One that comes back starts at the level of the others, which is where it would be anyway, or ahead of it.
        for name in gone:
            self._free.append(self._slots.pop(name))
        old = len(self.served)
        if len(self._free) * 2 > old:
            return
        new = max(_FIRST_CAPACITY, 2 * old)
        self.served = np.concatenate((self.served, np.zeros(new - old)))
        self._weights = np.concatenate((self._weights, np.ones(new - old)))
        self.waiting = np.concatenate((self.waiting, np.zeros(new - old, dtype=np.int64)))
        self._running = np.concatenate((self._running, np.zeros(new - old, dtype=np.int64)))
        self._free.extend(range(old, new))
