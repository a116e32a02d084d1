"""Gauges and counters of the engine core, read from its load snapshot at every scrape."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from sglang_lite.observability.transfers import SessionsLike, transfer_families


class LoadLike(Protocol):
    """The load snapshot fields that are exported (``engine.info.LoadSnapshot`` has them)."""

    @property
    def num_running(self) -> int: ...
    @property
    def paused(self) -> bool: ...
    @property
    def num_waiting(self) -> int: ...
    @property
    def num_retracted(self) -> int: ...
    @property
    def num_compiling(self) -> int: ...
    @property
    def num_pages(self) -> int: ...
    @property
    def page_size(self) -> int: ...
    @property
    def free_pages(self) -> int: ...
    @property
    def evictable_pages(self) -> int: ...
    @property
    def max_running_requests(self) -> int: ...
    @property
    def generation_throughput(self) -> float: ...
    @property
    def cache_hit_rate(self) -> float: ...
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def cached_tokens(self) -> int: ...
    @property
    def generated_tokens(self) -> int: ...
    @property
    def retractions(self) -> int: ...
    @property
    def evicted_tokens(self) -> int: ...
    @property
    def accept_length(self) -> float: ...
    @property
    def accept_rate(self) -> float: ...
    @property
    def verified_rows(self) -> int: ...
    @property
    def kv_event_batches(self) -> int: ...
    @property
    def kv_events(self) -> int: ...
    @property
    def kv_event_drops(self) -> int: ...
    @property
    def idle_seconds(self) -> float: ...
    @property
    def cpu_seconds(self) -> float: ...
    @property
    def used_tokens(self) -> int: ...
    @property
    def max_total_tokens(self) -> int: ...
    @property
    def token_usage(self) -> float: ...
    @property
    def transfers(self) -> SessionsLike | None: ...


class EngineCollector(Collector):
    """Exports the load snapshot it was last given.

    Args:
        labels: values of the labels of the serving process; the rank labels of a single engine are added, and
            ``dp_rank`` when there are several.
        context_length: most tokens of prompt and output together.
        weight_bytes, kv_cache_bytes: sizes, shown in GiB.
        startup_seconds: phase -> seconds.
        num_replicas: engines whose snapshots are given.

    Attributes:
        snapshots: (replica, its load), empty while nothing is known.
        adapter_slots: low-rank adapters loaded, and slots for them; None on a server that takes none.
    """

    def __init__(
        self,
        labels: Mapping[str, str],
        *,
        context_length: int,
        weight_bytes: int = 0,
        kv_cache_bytes: int = 0,
        startup_seconds: Mapping[str, float] | None = None,
        num_replicas: int = 1,
    ) -> None:
        ranks = {"tp_rank": "0", "pp_rank": "0", "moe_ep_rank": "0"}
        self._names = [*labels, *ranks]
        self._values = [*labels.values(), *ranks.values()]
        self._context_length = context_length
        self._sizes = {"weight": weight_bytes / 2**30, "kv_cache": kv_cache_bytes / 2**30}
        self._startup = dict(startup_seconds or {})
        self._has_ranks = num_replicas > 1
        self._is_prefill = labels.get("engine_type") == "prefill"
        self.snapshots: Sequence[tuple[int, LoadLike]] = ()
        self.adapter_slots: tuple[int, int] | None = None

    def _labels(self, replica: int | None) -> tuple[list[str], list[str]]:
        """Names and values; ``replica`` None for what concerns the whole server."""
        if replica is None or not self._has_ranks:
            return self._names, self._values
        return [*self._names, "dp_rank"], [*self._values, str(replica)]

    def _gauge(self, name: str, text: str, value: float, replica: int | None = None) -> Metric:
        names, values = self._labels(replica)
        family = GaugeMetricFamily(f"sglang:{name}", text, labels=names)
        family.add_metric(values, value)
        return family

    def _counter(self, name: str, text: str, value: float, replica: int) -> Metric:
        names, values = self._labels(replica)
        family = CounterMetricFamily(f"sglang:{name}", text, labels=names)
        family.add_metric(values, value)
        return family

    def describe(self) -> list[Metric]:
        """Nothing is known before the first snapshot."""
        return []

    def collect(self) -> Iterator[Metric]:
        """The families of the snapshot at hand, and the constants of the engine."""
        yield self._gauge("context_len", "Context limit in tokens.", self._context_length)
        for name, size in self._sizes.items():
            yield self._gauge(f"{name}_memory_usage_gb", f"Memory of the {name.replace('_', ' ')}, GiB.", size)
        if self.adapter_slots is not None:
            used, total = self.adapter_slots
            yield self._gauge("lora_pool_slots_used", "Low-rank adapters loaded.", used)
            yield self._gauge("lora_pool_slots_total", "Slots for low-rank adapters.", total)
            yield self._gauge("lora_pool_utilization", "Used share of these slots.", used / total)
        startup = GaugeMetricFamily(
            "sglang:startup_time_seconds", "Seconds of each start-up phase.", labels=[*self._names, "phase"]
        )
        for phase, seconds in self._startup.items():
            startup.add_metric([*self._values, phase], seconds)
        yield startup
        families: dict[str, Metric] = {}
        for replica, load in self.snapshots:
            for family in (
                *self._gauges(load, replica),
                *self._counters(load, replica),
                *self._transfers(load, replica),
            ):
                first = families.setdefault(family.name, family)
                if first is not family:
                    first.samples.extend(family.samples)
        yield from families.values()
        if self.snapshots:
            processes = CounterMetricFamily(
                "sglang:process_cpu_seconds", "Processor seconds of each process.", labels=["component"]
            )
            processes.add_metric(["server"], time.process_time())
            processes.add_metric(["scheduler"], sum(load.cpu_seconds for _, load in self.snapshots))
            yield processes

    def _gauges(self, load: LoadLike, replica: int) -> Iterator[Metric]:
        capacity = load.max_running_requests
        gauges: list[tuple[str, str, float]] = [
            ("num_running_reqs", "Requests in the running batch.", load.num_running),
            ("num_queue_reqs", "Requests waiting.", load.num_waiting),
            ("num_grammar_queue_reqs", "Grammars being compiled, each for one request or more.", load.num_compiling),
            ("num_retracted_reqs", "Requests preempted and waiting to resume.", load.num_retracted),
            ("num_paused_reqs", "Running requests held by a pause.", load.num_running if load.paused else 0),
            ("num_used_tokens", "KV token slots in use.", load.used_tokens),
            ("token_usage", "Used share of the KV pool.", load.token_usage),
            ("gen_throughput", "Output tokens per second.", load.generation_throughput),
            ("cache_hit_rate", "Share of prompt tokens found in the prefix cache.", load.cache_hit_rate),
            ("utilization", "Running requests over the limit.", load.num_running / capacity if capacity else 0.0),
            ("max_total_num_tokens", "KV token slots of the pool.", load.max_total_tokens),
            ("page_size", "Token slots of a page.", load.page_size),
            ("num_pages", "Pages of the pool.", load.num_pages),
            ("kv_available_tokens", "Free KV token slots.", load.free_pages * load.page_size),
            ("kv_evictable_tokens", "KV token slots held only by the cache.", load.evictable_pages * load.page_size),
            ("kv_used_tokens", "KV token slots held by requests.", load.used_tokens),
        ]
        if load.verified_rows:
            gauges += [
                ("spec_accept_length", "Tokens a row draws in a step that verifies guesses.", load.accept_length),
                ("spec_accept_rate", "Share of guessed tokens that were right.", load.accept_rate),
            ]
        for name, text, value in gauges:
            yield self._gauge(name, text, value, replica)

    def _transfers(self, load: LoadLike, replica: int) -> Iterator[Metric]:
        if load.transfers is not None:
            names, values = self._labels(replica)
            yield from transfer_families(load.transfers, names, values, is_prefill=self._is_prefill)

    def _counters(self, load: LoadLike, replica: int) -> Iterator[Metric]:
        counters: list[tuple[str, str, float]] = [
            ("num_retracted_requests", "Preemptions for memory.", load.retractions),
            ("evicted_tokens", "Prefix-cache tokens evicted.", load.evicted_tokens),
            ("scheduler_idle_seconds", "Seconds the engine core waited for work.", load.idle_seconds),
            ("scheduler_process_cpu_seconds", "Processor seconds of the engine core.", load.cpu_seconds),
        ]
        if load.verified_rows:
            counters.append(("spec_verify_calls", "Rows that verified guesses, added up.", load.verified_rows))
        if load.kv_event_batches:
            counters += [
                ("kv_events", "Events of the prefix cache for subscribers.", load.kv_events),
                ("kv_event_batches", "Batches of them, dropped ones included.", load.kv_event_batches),
                ("kv_event_batches_dropped", "Batches lost to a full queue.", load.kv_event_drops),
            ]
        for name, text, value in counters:
            yield self._counter(name, text, value, replica)
        names, values = self._labels(replica)
        realtime = CounterMetricFamily(
            "sglang:realtime_tokens", "Tokens by how they came about.", labels=[*names, "mode"]
        )
        realtime.add_metric([*values, "prefill_compute"], max(0, load.prompt_tokens - load.cached_tokens))
        realtime.add_metric([*values, "prefill_cache"], load.cached_tokens)
        realtime.add_metric([*values, "decode"], load.generated_tokens)
        yield realtime
