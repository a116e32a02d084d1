"""Prometheus metrics of the serving process.

Everything lives in a registry of its own, so that several servers in one process (tests) do not meet. The labels of
a server never change: every series is resolved once, and an observation is one method call.
"""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.registry import Collector

from sglang_lite.observability import buckets
from sglang_lite.observability.requests import RequestFamilies, RequestTracker

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class ServerMetrics:
    """All metrics of one server.

    Args:
        model_name: the served name.
        engine_type: "unified", "prefill" or "decode".
        extra_labels: further labels on every SGLang series.
    """

    def __init__(
        self, model_name: str, engine_type: str = "unified", extra_labels: Mapping[str, str] | None = None
    ) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self.labels: dict[str, str] = {"model_name": model_name, "engine_type": engine_type, **(extra_labels or {})}
        self.http = HttpMetrics(self.registry)
        self.loads_duration: Histogram = Histogram(
            "sglang:get_loads_duration_seconds",
            "Time to ask the engine core for its load.",
            list(self.labels),
            registry=self.registry,
            buckets=buckets.GET_LOADS,
        ).labels(**self.labels)
        families = RequestFamilies(self.registry, tuple(self.labels))
        self._unary = families.series(self.labels, streaming=False)
        self._streaming = families.series(self.labels, streaming=True)

    def track(self, *, streaming: bool, structured: bool = False) -> RequestTracker:
        """A context manager that counts one sequence from its start to its end, however it ends.

        Args:
            structured: whether its output has to match a grammar.
        """
        return RequestTracker(self._streaming if streaming else self._unary, structured=structured)

    def register(self, collector: Collector) -> None:
        """Add a collector that is asked at every scrape."""
        self.registry.register(collector)

    def render(self) -> bytes:
        """Everything registered, in the text format 0.0.4."""
        return generate_latest(self.registry)


class HttpMetrics:
    """Counts of HTTP requests by route, method and status."""

    def __init__(self, registry: CollectorRegistry) -> None:
        route = ["endpoint", "method"]
        self.requests = Counter("sglang:http_requests_total", "HTTP requests received.", route, registry=registry)
        self.responses = Counter(
            "sglang:http_responses_total",
            "HTTP responses sent.",
            ["endpoint", "status_code", "method"],
            registry=registry,
        )
        self.active = Gauge("sglang:http_requests_active", "HTTP requests being served.", route, registry=registry)
        self._routing_keys: dict[str, int] = {}
        keys = Gauge("sglang:routing_keys_active", "Routing keys of requests being served.", registry=registry)
        keys.set_function(lambda: len(self._routing_keys))

    def started(self, endpoint: str, method: str, routing_key: str | None = None) -> None:
        """A request arrived; ``routing_key`` is what its x-smg-routing-key says."""
        self.requests.labels(endpoint, method).inc()
        self.active.labels(endpoint, method).inc()
        if routing_key:
            self._routing_keys[routing_key] = self._routing_keys.get(routing_key, 0) + 1

    def ended(self, endpoint: str, method: str, status: int | None, routing_key: str | None = None) -> None:
        """Its reply ended; ``status`` is None when the client left before one."""
        self.active.labels(endpoint, method).dec()
        if routing_key:
            self._routing_keys[routing_key] -= 1
            if not self._routing_keys[routing_key]:
                del self._routing_keys[routing_key]
        if status is not None:
            self.responses.labels(endpoint, str(status), method).inc()
