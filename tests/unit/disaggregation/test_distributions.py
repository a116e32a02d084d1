"""Distributions of transfers."""

from __future__ import annotations

import pytest

from sglang_lite.disaggregation.base import SessionStats, merge_stats
from sglang_lite.disaggregation.distributions import Distributions, add
from sglang_lite.observability.buckets import TRANSFER_BUCKETS


def test_values_fall_into_buckets_up_to_their_bound() -> None:
    found = Distributions()
    for value in (0.5, 1.0, 1.1, 9999.0):
        found.observe("kv_transfer_latency_ms", value)
    total, *counts = found.copy()["kv_transfer_latency_ms"]
    assert total == pytest.approx(10001.6)
    assert counts[:2] == [2, 1]
    assert counts[-1] == 1
    assert sum(counts) == 4
    assert len(counts) == len(TRANSFER_BUCKETS["kv_transfer_latency_ms"]) + 1


def test_a_transfer_is_counted_by_time_size_and_speed() -> None:
    found = Distributions()
    found.observe_transfer(2_000_000, 0.004)
    sums = {name: counts[0] for name, counts in found.copy().items()}
    assert sums["kv_transfer_latency_ms"] == pytest.approx(4.0)
    assert sums["kv_transfer_total_mb"] == pytest.approx(2.0)
    assert sums["kv_transfer_speed_gb_s"] == pytest.approx(0.5)


def test_stats_of_replicas_add_up() -> None:
    one, other = Distributions(), Distributions()
    one.observe("kv_transfer_alloc_ms", 3.0)
    other.observe("kv_transfer_alloc_ms", 4.0)
    other.observe("kv_transfer_total_mb", 1.0)
    merged = merge_stats(
        [
            SessionStats(bytes=1, by_state={"transferring": 2}, failures={"a": 1}, distributions=one.copy()),
            SessionStats(bytes=2, failures={"a": 1, "b": 1}, completed_checksums=("c",), distributions=other.copy()),
        ]
    )
    assert merged is not None
    assert (merged.bytes, merged.by_state, merged.failures) == (3, {"transferring": 2}, {"a": 2, "b": 1})
    assert merged.completed_checksums == ("c",)
    assert merged.distributions == add(one.copy(), other.copy())
    assert merged.distributions["kv_transfer_alloc_ms"][0] == 7.0
    assert merge_stats([]) is None
