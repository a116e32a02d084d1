"""The configuration file of the router, TOML or YAML: sections and fields become options."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from sglang_lite.types import StartupError

_SECTIONS: dict[str, dict[str, str]] = {
    "server": {"host": "host", "port": "port"},
    "observability": {"log_level": "log_level"},
    "proxy": {"request_timeout_secs": "request_timeout_secs", "max_payload_size": "max_payload_size"},
    "active_load": {"stale_request_timeout_secs": "stale_request_timeout_secs"},
}
_BREAKER = {"failure_threshold": "cb_failure_threshold", "cooldown_secs": "cb_timeout_duration_secs"}
_CACHE = {
    "match_threshold": "cache_threshold",
    "balance_abs_threshold": "balance_abs_threshold",
    "balance_rel_threshold": "balance_rel_threshold",
}


def read_file(path: Path) -> dict[str, Any]:
    """Options of a configuration file.

    Raises:
        StartupError: unreadable, of an unknown kind, or with a field that does not exist; the message names it.
    """
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".toml":
            document: Any = tomllib.loads(text)
        elif path.suffix in (".yaml", ".yml"):
            document = yaml.safe_load(text) or {}
        else:
            raise StartupError(f"--config: {path}: the name must end in .toml, .yaml or .yml")
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise StartupError(f"--config: cannot read {path}: {error}") from None
    if not isinstance(document, dict):
        raise StartupError(f"--config: {path} must hold sections")
    found: dict[str, Any] = {}
    for name, section in document.items():
        if name == "models":
            _models(section, found)
        elif name == "discovery":
            _discovery(section, found)
        elif name in _SECTIONS:
            _take(name, section, _SECTIONS[name], found)
        else:
            raise StartupError(f"--config: unknown section {name!r}")
    return found


def _models(section: Any, found: dict[str, Any]) -> None:
    if not isinstance(section, list) or not all(isinstance(item, dict) and item.get("id") for item in section):
        raise StartupError("--config: models must be a list of tables with an id")
    found["models"] = tuple(str(item["id"]) for item in section)
    if len({item.get("policy") for item in section}) > 1:
        raise StartupError("--config: models: all models share one policy")
    for item in section:
        rest = {key: value for key, value in item.items() if key not in ("id", "circuit_breaker", "cache_aware")}
        _take("models", rest, {"policy": "policy"}, found)
        _take("models.circuit_breaker", item.get("circuit_breaker", {}), _BREAKER, found)
        _take("models.cache_aware", item.get("cache_aware", {}), _CACHE, found)


_CLUSTER = {
    "label_selector": "selector",
    "prefill_selector": "prefill_selector",
    "decode_selector": "decode_selector",
    "namespace": "service_discovery_namespace",
    "port": "service_discovery_port",
    "resource": "service_discovery_resource",
    "protocol": "service_discovery_protocol",
}


def _discovery(section: Any, found: dict[str, Any]) -> None:
    rest = dict(section) if isinstance(section, dict) else {}
    backend = rest.pop("backend", None)
    if backend == "k8s":
        for name in ("label_selector", "prefill_selector", "decode_selector"):
            if name in rest:
                rest[name] = tuple(map(str, rest[name] if isinstance(rest[name], list) else [rest[name]]))
        _take("discovery", rest, _CLUSTER, found)
        found["service_discovery"] = True
        return
    if backend != "static_urls":
        raise StartupError(f"--config: discovery.backend {backend!r}: must be static_urls or k8s")
    _take("discovery", rest, {"urls": "worker_urls"}, found)
    if isinstance(found.get("worker_urls"), list):
        found["worker_urls"] = tuple(found["worker_urls"])
    if not found.get("worker_urls") or not all(isinstance(url, str) and url.strip() for url in found["worker_urls"]):
        raise StartupError("--config: discovery.urls must be a list of addresses that are not empty")


def _take(name: str, section: Any, names: Mapping[str, str], found: dict[str, Any]) -> None:
    if not isinstance(section, dict):
        raise StartupError(f"--config: {name} must be a table")
    for key, value in section.items():
        if key not in names:
            raise StartupError(f"--config: unknown field {name}.{key} (known: {', '.join(names)})")
        found[names[key]] = value
