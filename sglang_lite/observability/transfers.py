"""Series of a prefill or decode server: requests by where their pages are, and what has been moved."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from sglang_lite.observability.buckets import TRANSFER_BUCKETS


class SessionsLike(Protocol):
    """The fields of ``disaggregation.base.SessionStats`` that are exported."""

    @property
    def unopened(self) -> int: ...
    @property
    def by_state(self) -> Mapping[str, int]: ...
    @property
    def quarantined(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    @property
    def transfers(self) -> int: ...
    @property
    def seconds(self) -> float: ...
    @property
    def retries(self) -> int: ...
    @property
    def failures(self) -> Mapping[str, int]: ...
    @property
    def distributions(self) -> Mapping[str, Sequence[float]]: ...


def transfer_families(
    stats: SessionsLike, names: Sequence[str], values: Sequence[str], *, is_prefill: bool
) -> Iterator[Metric]:
    """Gauges and counters with the labels ``names`` of the values ``values``; SGLang's names where it has them."""
    opening = stats.by_state.get("bootstrapping", 0)
    moving = stats.by_state.get("waiting_for_input", 0) + stats.by_state.get("transferring", 0)
    if is_prefill:
        gauges = [
            ("num_prefill_bootstrap_queue_reqs", "Requests whose decode server is not heard of yet.", opening),
            ("num_prefill_inflight_queue_reqs", "Requests whose pages are being computed or sent.", moving),
        ]
    else:
        gauges = [
            ("num_decode_prealloc_queue_reqs", "Requests without pages here yet.", stats.unopened + opening),
            ("num_decode_transfer_queue_reqs", "Requests whose pages are on their way here.", moving),
        ]
    gauges.append(("num_quarantined_reqs", "Ended requests whose pages may still be touched.", stats.quarantined))
    for name, text, value in gauges:
        gauge = GaugeMetricFamily(f"sglang:{name}", text, labels=names)
        gauge.add_metric(values, value)
        yield gauge
    counters: list[tuple[str, str, float]] = [
        ("num_transfer_failed_reqs", "Requests whose transfer failed.", sum(stats.failures.values())),
        ("kv_transfers", "Transfers completed.", stats.transfers),
        ("kv_transfer_bytes", "Bytes of completed transfers.", stats.bytes),
        ("kv_transfer_seconds", "Seconds of completed transfers, added up.", stats.seconds),
        ("kv_transfer_retries", "Submissions and messages that were tried again.", stats.retries),
    ]
    for name, text, number in counters:
        counter = CounterMetricFamily(f"sglang:{name}", text, labels=names)
        counter.add_metric(values, number)
        yield counter
    reasons = CounterMetricFamily(
        "sglang:kv_transfer_failures", "Requests that ended with a failure, by reason.", labels=[*names, "reason"]
    )
    for reason, count in stats.failures.items():
        reasons.add_metric([*values, reason], count)
    yield reasons
    for name, counts in stats.distributions.items():
        yield _histogram(name, counts, names, values)


def _histogram(name: str, counts: Sequence[float], names: Sequence[str], values: Sequence[str]) -> Metric:
    """Buckets of SGLang's names, which count what is at most their bound."""
    edges = [*(format(bound, "g") for bound in TRANSFER_BUCKETS[name]), "+Inf"]
    below = list(zip(edges, itertools.accumulate(counts[1:]), strict=True))
    family = HistogramMetricFamily(f"sglang:{name}", "Of one transfer.", labels=names)
    family.add_metric(values, buckets=below, sum_value=counts[0])
    return family
