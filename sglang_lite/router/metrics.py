"""Counters of one router process."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 15, 30, 45, 60, 90, 120, 180, 240)

_BLOCKS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


class RouterMetrics:
    """Metrics under the names of the native runtime, and of SGLang's router where that measures the same."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        registry = self.registry
        self.requests = Counter("sgl_router_requests", "Requests answered.", ("path", "status"), registry=registry)
        self.stale = Counter("sgl_router_stale_requests", "Requests that expired.", registry=registry)
        self.active = Gauge("sgl_router_active_load", "Requests that workers have.", registry=registry)
        self.retries = Counter("smg_worker_retries", "Requests sent once more.", registry=registry)
        self.affinity = Counter(
            "sgl_router_decode_affinity", "Why decode workers were chosen.", ("result",), registry=registry
        )
        self.rate_limit = Counter("smg_http_rate_limit", "Requests under limits.", ("result",), registry=registry)
        self.waiting = Gauge("sgl_router_queued_requests", "Requests that wait for their turn.", registry=registry)
        self.overlap = Histogram(
            "sgl_router_overlap_blocks",
            "Blocks of a prompt that its worker was known to hold; only where KV events tell.",
            buckets=_BLOCKS,
            registry=registry,
        )
        self.moves = Counter("sgl_router_migrated_streams", "Streams that went on elsewhere.", registry=registry)
        self.hedges = Counter(
            "sgl_router_hedges", "Requests sent to a second worker, by how that ended.", ("result",), registry=registry
        )
        self.unhedged = Counter(
            "sgl_router_hedges_skipped", "Requests that were to be, and why not.", ("reason",), registry=registry
        )
        self.found = Counter("smg_discovery_registrations", "Workers found in a cluster.", registry=registry)
        self.lost = Counter("smg_discovery_deregistrations", "Workers gone from a cluster.", registry=registry)
        self.duration = Histogram(
            "smg_http_request_duration_seconds",
            "Time to the end of an answer.",
            ("path",),
            buckets=_SECONDS,
            registry=registry,
        )
        self.health = Gauge("smg_worker_health", "1 while healthy.", ("worker",), registry=registry)
        self.breaker = Gauge("smg_worker_cb_state", "0 closed, 1 open, 2 half open.", ("worker",), registry=registry)

    def text(self) -> bytes:
        """Exposition format 0.0.4."""
        return generate_latest(self.registry)
