"""Distributions of transfers, in the buckets of SGLang's histograms. Plain numbers, so that they cross processes."""

from __future__ import annotations

from bisect import bisect_left

from sglang_lite.observability.buckets import TRANSFER_BUCKETS

Distribution = list[float]
"""The sum of the values, then how many fell into each bucket."""


class Distributions:
    """Counts values by name. Used by one thread; another may copy."""

    def __init__(self) -> None:
        self._found: dict[str, Distribution] = {}

    def observe(self, name: str, value: float) -> None:
        """Count a value under one of the names of ``TRANSFER_BUCKETS``."""
        bounds = TRANSFER_BUCKETS[name]
        counts = self._found.setdefault(name, [0.0] * (len(bounds) + 2))
        counts[0] += value
        counts[1 + bisect_left(bounds, value)] += 1

    def observe_transfer(self, num_bytes: int, seconds: float) -> None:
        """A transfer of that many bytes took that long."""
        self.observe("kv_transfer_latency_ms", seconds * 1e3)
        self.observe("kv_transfer_total_mb", num_bytes / 1e6)
        self.observe("kv_transfer_speed_gb_s", num_bytes / max(seconds, 1e-9) / 1e9)

    def copy(self) -> dict[str, Distribution]:
        """What was counted so far."""
        return {name: list(counts) for name, counts in list(self._found.items())}


def add(left: dict[str, Distribution], right: dict[str, Distribution]) -> dict[str, Distribution]:
    """Both together."""
    merged = dict(left)
    for name, counts in right.items():
        known = merged.get(name)
        merged[name] = counts if known is None else [a + b for a, b in zip(known, counts, strict=True)]
    return merged
