"""Load reports for routers and operators."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from aiohttp import web

from sglang_lite import __version__
from sglang_lite.disaggregation.base import SessionStats
from sglang_lite.engine.adapter_registry import AdapterRegistry
from sglang_lite.engine.info import EngineInfo, LoadSnapshot
from sglang_lite.observability.metrics import CONTENT_TYPE
from sglang_lite.server.context import context_of
from sglang_lite.server.errors import json_response
from sglang_lite.types import RequestError

_SECTIONS = ("core", "memory", "spec", "lora", "disagg", "queues")
_PREFIXES = {
    "memory": "sglang_memory_",
    "queues": "sglang_queues_",
    "speculative": "sglang_spec_",
    "lora": "sglang_lora_",
    "disaggregation": "sglang_disagg_",
}


def core_section(load: LoadSnapshot, rank: int = 0) -> dict[str, Any]:
    """The flat fields of one load, under SGLang's names and the native runtime's."""
    capacity = load.max_running_requests
    requests = load.num_running + load.num_waiting
    return {
        "timestamp": load.timestamp,
        "dp_rank": rank,
        "num_running_reqs": load.num_running,
        "num_waiting_reqs": load.num_waiting,
        "num_waiting_uncached_tokens": load.waiting_tokens,
        "num_used_tokens": load.used_tokens,
        "num_total_tokens": load.used_tokens + load.waiting_tokens,
        "num_active_tokens": load.used_tokens,
        "num_prealloc_ready_tokens": 0,
        "max_total_num_tokens": load.max_total_tokens,
        "max_running_requests": capacity,
        "token_usage": load.token_usage,
        "gen_throughput": load.generation_throughput,
        "cache_hit_rate": load.cache_hit_rate,
        "utilization": load.num_running / capacity if capacity else 0.0,
        "total_prefill_uncached_tokens": load.prompt_tokens - load.cached_tokens,
        "num_reqs": requests,
        "waiting_queue_depth": load.num_waiting,
        "decode_queue_depth": load.num_running,
        "available_cache_pages": load.free_pages + load.evictable_pages,
        "free_pages": load.free_pages,
    }


def _memory_section(load: LoadSnapshot, info: EngineInfo) -> dict[str, Any]:
    return {
        "weight_gb": info.weight_bytes / 2**30,
        "kv_cache_gb": info.num_pages * info.kv_cache.page_size_bytes / 2**30,
        "graph_gb": 0.0,
        "token_capacity": load.max_total_tokens,
    }


def _adapter_section(adapters: AdapterRegistry) -> dict[str, Any]:
    used, total = adapters.num_used, adapters.num_slots
    return {"slots_used": used, "slots_total": total, "utilization": used / total}


def _queues_section(load: LoadSnapshot) -> dict[str, Any]:
    paused = load.num_running if load.paused else 0
    waiting = load.num_waiting
    return {
        "waiting": waiting,
        "grammar": load.num_compiling,
        "paused": paused,
        "retracted": load.num_retracted,
        "prealloc_ready": 0,
    }


def _transfer_section(load: LoadSnapshot, stats: SessionStats, mode: str) -> dict[str, Any]:
    states, is_prefill = stats.by_state, mode == "prefill"
    opening = states.get("bootstrapping", 0)
    moving = states.get("waiting_for_input", 0) + states.get("transferring", 0)
    return {
        "mode": mode,
        "prefill_bootstrap_queue_reqs": opening if is_prefill else 0,
        "prefill_inflight_queue_reqs": moving if is_prefill else 0,
        "decode_prealloc_queue_reqs": 0 if is_prefill else stats.unopened + opening,
        "decode_transfer_queue_reqs": 0 if is_prefill else moving,
        "decode_retracted_queue_reqs": 0 if is_prefill else load.num_retracted,
        "kv_transfer_speed_gb_s": stats.bytes / stats.seconds / 1e9 if stats.seconds else 0.0,
        "kv_transfer_latency_ms": stats.seconds / stats.transfers * 1e3 if stats.transfers else 0.0,
        "quarantined_reqs": stats.quarantined,
        "transfers": stats.transfers,
        "bytes": stats.bytes,
        "spans": stats.spans,
        "retries": stats.retries,
        "failures": sum(stats.failures.values()),
    }


def _wanted_sections(include: str | None) -> set[str]:
    """Raises RequestError for a section that does not exist."""
    names = {name.strip() for name in (include or "all").split(",") if name.strip()}
    unknown = sorted(names - {*_SECTIONS, "all"})
    if unknown:
        allowed = ", ".join((*_SECTIONS, "all"))
        raise RequestError(f"Invalid include sections: {', '.join(unknown)[:200]}; allowed: {allowed}", field="include")
    return set(_SECTIONS) if "all" in names else names


def _wanted_rank(text: str | None) -> int | None:
    """None for all of them. Raises RequestError for a rank that is no integer."""
    try:
        return None if text is None else int(text)
    except ValueError:
        raise RequestError(f"dp_rank must be an integer, got {text!r:.50}", field="dp_rank") from None


def _load_entry(
    load: LoadSnapshot, rank: int, info: EngineInfo, adapters: AdapterRegistry, sections: set[str], mode: str
) -> dict[str, Any]:
    entry: dict[str, Any] = {"timestamp": load.timestamp, "dp_rank": rank}
    if "core" in sections:
        entry = core_section(load, rank)
    if "memory" in sections:
        entry["memory"] = _memory_section(load, info)
    if "spec" in sections and load.verified_rows:
        entry["speculative"] = {"accept_length": load.accept_length, "accept_rate": load.accept_rate}
    if "lora" in sections and adapters.num_slots:
        entry["lora"] = _adapter_section(adapters)
    if "disagg" in sections and load.transfers is not None:
        entry["disaggregation"] = _transfer_section(load, load.transfers, mode)
    if "queues" in sections:
        entry["queues"] = _queues_section(load)
    return entry


def _prometheus_lines(entry: dict[str, Any]) -> Iterator[str]:
    label = f'{{dp_rank="{entry["dp_rank"]}"}}'
    for name, value in entry.items():
        if isinstance(value, dict):
            prefix = _PREFIXES[name]
            yield from (f"{prefix}{key}{label} {number}" for key, number in value.items() if key != "mode")
        elif name not in ("timestamp", "dp_rank"):
            yield f"sglang_{name}{label} {value}"


async def loads(request: web.Request) -> web.Response:
    """The load of every replica. ``include`` picks sections, ``format=prometheus`` changes the format."""
    context, query = context_of(request), request.query
    sections = _wanted_sections(query.get("include"))
    rank = _wanted_rank(query.get("dp_rank"))
    replicas = await context.engine.replica_loads()
    entries = [
        _load_entry(
            load,
            replica,
            context.engine.info,
            context.engine.adapters,
            sections,
            context.config.disaggregation_mode,
        )
        for replica, load in replicas
        if rank is None or rank == replica
    ]
    if query.get("format") == "prometheus":
        text = "".join(f"{line}\n" for entry in entries for line in _prometheus_lines(entry))
        return web.Response(body=text.encode(), headers={"Content-Type": CONTENT_TYPE})
    device = context.engine.info.device
    body = {
        "timestamp": datetime.now(UTC).isoformat(),
        "version": __version__,
        "accelerator": None if device == "cpu" else device,
        "num_accelerators": 0 if device == "cpu" else context.config.tp_size * context.config.dp_size,
        "aggregate": {"total_tokens": sum(load.num_running + load.num_waiting for _, load in replicas)},
        "loads": entries,
    }
    return json_response(body)


async def get_load(request: web.Request) -> web.Response:
    """The older, shorter report."""
    entries = [
        {
            "dp_rank": replica,
            "num_reqs": load.num_running + load.num_waiting,
            "num_waiting_reqs": load.num_waiting,
            "num_tokens": load.used_tokens + load.waiting_tokens,
            "num_pending_tokens": load.waiting_tokens,
        }
        for replica, load in await context_of(request).engine.replica_loads()
    ]
    return json_response(entries)


def add_load_routes(app: web.Application) -> None:
    """Register the routes of this module."""
    app.router.add_get("/v1/loads", loads)
    app.router.add_get("/get_loads", loads)
    app.router.add_get("/get_load", get_load)
