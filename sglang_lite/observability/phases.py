"""Histograms of where requests spend their time: what ``explain`` says of one request, for all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from prometheus_client import CollectorRegistry, Histogram

from sglang_lite.observability import buckets
from sglang_lite.types import RequestTimeline


class TimedOutput(Protocol):
    """What is read of the last snapshot of a sequence."""

    @property
    def first_token_at(self) -> float | None: ...
    @property
    def finished_at(self) -> float | None: ...
    @property
    def timeline(self) -> RequestTimeline | None: ...


class PhaseFamilies:
    """The metric families, under the labels that every SGLang series carries."""

    def __init__(self, registry: CollectorRegistry, label_names: Sequence[str]) -> None:
        base = list(label_names)

        def histogram(name: str, text: str, labels: list[str], bounds: Sequence[float]) -> Histogram:
            return Histogram(f"sglang:{name}", text, labels, registry=registry, buckets=bounds)

        self._queue = histogram("queue_time_seconds", "Time in the waiting queue.", base, buckets.QUEUE_TIME)
        self._waits = histogram(
            "request_wait_seconds", "Time in the queue by what it waited for.", [*base, "cause"], buckets.PHASE
        )
        self._prefill = histogram(
            "request_prefill_seconds", "From the first chunk of a prompt to the first token.", base, buckets.PHASE
        )
        self._decode = histogram(
            "request_decode_seconds", "From the first token to the end, without preemptions.", base, buckets.PHASE
        )
        self._chunks = histogram("request_prefill_chunks", "Chunks that a prompt was computed in.", base, buckets.COUNT)
        self._preemptions = histogram("request_preemptions", "Preemptions of a request.", base, buckets.COUNT)

    def series(self, labels: Mapping[str, str]) -> PhaseSeries:
        """The series with these label values."""
        return PhaseSeries(
            queue=self._queue.labels(**labels),
            prefill=self._prefill.labels(**labels),
            decode=self._decode.labels(**labels),
            chunks=self._chunks.labels(**labels),
            preemptions=self._preemptions.labels(**labels),
            waits=self._waits,
            labels=dict(labels),
        )


@dataclass(slots=True, frozen=True)
class PhaseSeries:
    """The series of one server. ``waits`` is the family: its causes are few and come up as they occur."""

    queue: Histogram
    prefill: Histogram
    decode: Histogram
    chunks: Histogram
    preemptions: Histogram
    waits: Histogram
    labels: dict[str, str]

    def observe(self, output: TimedOutput, now: float) -> None:
        """Count a sequence that is over; one that the engine never took counts nowhere."""
        record = output.timeline
        if record is None:
            return
        self.queue.observe(record.queue_seconds)
        for cause, seconds in record.waits.items():
            self.waits.labels(**self.labels, cause=cause).observe(seconds)
        self.preemptions.observe(record.preemptions)
        if record.prefill_chunks:
            self.prefill.observe(record.prefill_seconds)
            self.chunks.observe(record.prefill_chunks)
        if output.first_token_at is not None:
            ended = now if output.finished_at is None else output.finished_at
            self.decode.observe(max(0.0, ended - output.first_token_at - record.requeue_seconds))
