"""Counters, latencies and sizes of generation requests, under SGLang's names and the native runtime's."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Summary

from sglang_lite.observability import buckets
from sglang_lite.observability.phases import PhaseFamilies, PhaseSeries
from sglang_lite.types import RequestTimeline


class FinishLike(Protocol):
    """The part of a finish reason that is counted."""

    @property
    def type(self) -> str: ...


class SnapshotLike(Protocol):
    """The parts of a cumulative generation snapshot that are counted."""

    @property
    def prompt_tokens(self) -> int: ...
    @property
    def completion_tokens(self) -> int: ...
    @property
    def resumed_tokens(self) -> int: ...
    @property
    def cached_tokens(self) -> int: ...
    @property
    def finish_reason(self) -> FinishLike | None: ...
    @property
    def first_token_at(self) -> float | None: ...
    @property
    def finished_at(self) -> float | None: ...
    @property
    def timeline(self) -> RequestTimeline | None: ...


@dataclass(slots=True, frozen=True)
class RequestSeries:
    """The series of one server and one kind of request (streaming or not), resolved to their labels."""

    requests: Counter
    structured: Counter
    aborted: Counter
    prompt_tokens: Counter
    generation_tokens: Counter
    cached_tokens: Counter
    prompt_sizes: Histogram
    uncached_prompt_sizes: Histogram
    generation_sizes: Histogram
    time_to_first_token: Histogram
    inter_token: Histogram
    time_per_output_token: Histogram
    end_to_end: Histogram
    native: NativeSeries
    phases: PhaseSeries


class NativeSeries:
    """The metrics of the native runtime: no labels, underscores for colons."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = Counter("sglang_requests_total", "Generation requests.", registry=registry)
        self.failed = Counter(
            "sglang_requests_failed_total", "Generation requests that failed or whose client left.", registry=registry
        )
        self.prompt_tokens = Counter("sglang_prompt_tokens_total", "Prompt tokens.", registry=registry)
        self.generation_tokens = Counter("sglang_generation_tokens_total", "Output tokens.", registry=registry)
        self.cached_tokens = Counter(
            "sglang_cached_tokens_total", "Prompt tokens found in the prefix cache.", registry=registry
        )
        self.in_flight = Gauge("sglang_requests_in_flight", "Generation requests being served.", registry=registry)
        self.time_to_first_token = Summary(
            "sglang_time_to_first_token_seconds", "Arrival to first token.", registry=registry
        )
        self.duration = Summary("sglang_request_duration_seconds", "Arrival to end.", registry=registry)


class RequestFamilies:
    """The metric families of generation requests.

    Args:
        label_names: names of the labels that every SGLang series carries.
    """

    def __init__(self, registry: CollectorRegistry, label_names: Sequence[str]) -> None:
        base = list(label_names)
        streaming = [*base, "is_streaming"]

        def counter(name: str, text: str, labels: list[str]) -> Counter:
            return Counter(f"sglang:{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, labels: list[str], bounds: Sequence[float]) -> Histogram:
            return Histogram(f"sglang:{name}", text, labels, registry=registry, buckets=bounds)

        self._requests = counter("num_requests_total", "Requests finished.", streaming)
        self._structured = counter("num_so_requests_total", "Requests with a grammar finished.", base)
        self._aborted = counter("num_aborted_requests_total", "Requests aborted.", base)
        self._prompt = counter("prompt_tokens_total", "Prompt tokens processed.", streaming)
        self._generation = counter("generation_tokens_total", "Output tokens.", streaming)
        self._cached = counter("cached_tokens_total", "Prompt tokens found in a cache.", [*base, "cache_source"])
        count = buckets.TOKEN_COUNT
        self._prompt_sizes = histogram("prompt_tokens_histogram", "Prompt lengths.", base, count)
        self._uncached_sizes = histogram(
            "uncached_prompt_tokens_histogram", "Prompt tokens not found in a cache.", base, count
        )
        self._generation_sizes = histogram("generation_tokens_histogram", "Output lengths.", base, count)
        first, between, whole = buckets.TIME_TO_FIRST_TOKEN, buckets.INTER_TOKEN, buckets.END_TO_END
        self._first = histogram("time_to_first_token_seconds", "Arrival to first token.", streaming, first)
        self._between = histogram("inter_token_latency_seconds", "Time between output tokens.", base, between)
        self._per_token = histogram(
            "request_time_per_output_token_seconds", "Mean time per output token.", streaming, between
        )
        self._whole = histogram("e2e_request_latency_seconds", "Arrival to end.", streaming, whole)
        self._native = NativeSeries(registry)
        self._phases = PhaseFamilies(registry, label_names)

    def series(self, labels: Mapping[str, str], *, streaming: bool) -> RequestSeries:
        """The series of requests with these label values."""
        kind = {**labels, "is_streaming": "true" if streaming else "false"}
        return RequestSeries(
            requests=self._requests.labels(**kind),
            structured=self._structured.labels(**labels),
            aborted=self._aborted.labels(**labels),
            prompt_tokens=self._prompt.labels(**kind),
            generation_tokens=self._generation.labels(**kind),
            cached_tokens=self._cached.labels(**labels, cache_source="device"),
            prompt_sizes=self._prompt_sizes.labels(**labels),
            uncached_prompt_sizes=self._uncached_sizes.labels(**labels),
            generation_sizes=self._generation_sizes.labels(**labels),
            time_to_first_token=self._first.labels(**kind),
            inter_token=self._between.labels(**labels),
            time_per_output_token=self._per_token.labels(**kind),
            end_to_end=self._whole.labels(**kind),
            native=self._native,
            phases=self._phases.series(labels),
        )


class RequestTracker:
    """Counts one sequence. Use it as a context manager: whatever ends the block, the sequence leaves the gauge."""

    __slots__ = ("_first_at", "_last", "_last_at", "_series", "_started_at", "_structured", "_tokens")

    def __init__(self, series: RequestSeries, *, structured: bool = False) -> None:
        self._structured = structured
        self._series = series
        self._started_at = 0.0
        self._first_at = 0.0
        self._last_at = 0.0
        self._tokens = 0
        self._last: SnapshotLike | None = None

    def __enter__(self) -> RequestTracker:
        # The clock of the snapshots.
        self._started_at = time.time()
        self._series.native.requests.inc()
        self._series.native.in_flight.inc()
        return self

    def observe(self, output: SnapshotLike) -> None:
        """Take note of a snapshot."""
        self._last = output
        new_tokens = output.completion_tokens - max(self._tokens, output.resumed_tokens)
        if new_tokens <= 0:
            return
        now = time.time()
        if self._tokens == 0:
            # A reply that is not streamed has one snapshot, long after its first token.
            first = now if output.first_token_at is None else output.first_token_at
            self._first_at = self._last_at = first
            self._series.time_to_first_token.observe(max(0.0, first - self._started_at))
            self._series.native.time_to_first_token.observe(max(0.0, first - self._started_at))
            new_tokens -= 1
        if new_tokens:
            interval = max(0.0, now - self._last_at) / new_tokens
            for _ in range(new_tokens):
                self._series.inter_token.observe(interval)
        self._tokens = output.completion_tokens
        self._last_at = now

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        native, seconds = self._series.native, max(0.0, time.time() - self._started_at)
        native.in_flight.dec()
        native.duration.observe(seconds)
        if self._last is not None:
            self._count_tokens(self._last)
            self._series.phases.observe(self._last, time.time())
        reason: Any = self._last.finish_reason if self._last is not None else None
        if reason is None or reason.type == "abort":
            native.failed.inc()
            self._series.aborted.inc()
            return
        self._series.requests.inc()
        if self._structured:
            self._series.structured.inc()
        self._series.end_to_end.observe(seconds)
        made = self._tokens - (self._last.resumed_tokens if self._last is not None else 0)
        if made > 1:
            seconds = max(0.0, self._last_at - self._first_at)
            self._series.time_per_output_token.observe(seconds / (made - 1))

    def _count_tokens(self, output: SnapshotLike) -> None:
        series, native = self._series, self._series.native
        series.prompt_tokens.inc(output.prompt_tokens)
        made = output.completion_tokens - output.resumed_tokens
        series.generation_tokens.inc(made)
        series.cached_tokens.inc(output.cached_tokens)
        native.prompt_tokens.inc(output.prompt_tokens)
        native.generation_tokens.inc(made)
        native.cached_tokens.inc(output.cached_tokens)
        series.prompt_sizes.observe(output.prompt_tokens)
        series.uncached_prompt_sizes.observe(max(0, output.prompt_tokens - output.cached_tokens))
        series.generation_sizes.observe(made)
