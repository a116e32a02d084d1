"""Options of ``sglang-lite router``: the command line of SGLang's router, and a TOML or YAML file."""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import yaml

from sglang_lite.router.policies import POLICIES
from sglang_lite.router.workers import normalize_url
from sglang_lite.types import StartupError

PROGRAM = "sglang-lite router"


def _option(default: Any, text: str, **more: Any) -> Any:
    return field(default=default, metadata={"help": text, **more})


@dataclass(frozen=True, slots=True)
class RouterOptions:
    """All options. Times are in seconds unless the name says otherwise, sizes in bytes."""

    host: str = _option("0.0.0.0", "address to listen on")
    port: int = _option(30000, "port to listen on", low=0, high=65535)
    worker_urls: tuple[str, ...] = _option((), "addresses of workers")
    policy: str = _option("cache_aware", "how a worker is chosen", choices=tuple(POLICIES))
    pd_disaggregation: bool = _option(False, "prefill and decode workers apart")
    prefill: tuple[tuple[str, int | None], ...] = _option((), "URL [BOOTSTRAP_PORT], repeatable")
    decode: tuple[str, ...] = _option((), "URL, repeatable")
    prefill_policy: str | None = _option(None, "policy of the prefill pool", choices=tuple(POLICIES))
    decode_policy: str | None = _option(None, "policy of the decode pool", choices=tuple(POLICIES))
    models: tuple[str, ...] = _option((), "models that are served, with workers or (for now) without")
    cache_threshold: float = _option(0.5, "share of a prompt that must be known to its worker", low=0, high=1)
    balance_abs_threshold: int = _option(32, "difference of loads that is out of balance", low=0)
    balance_rel_threshold: float = _option(1.1, "ratio of loads that is out of balance", low=1)
    max_tree_size: int = _option(64 << 20, "size of a prefix tree", low=1024)
    max_payload_size: int = _option(1 << 20, "largest body", low=1)
    request_timeout_secs: float = _option(300.0, "time to a whole answer, or between two parts of a stream", above=0)
    stale_request_timeout_secs: float = _option(600.0, "longest life of a request", above=0)
    shutdown_grace_period_secs: float = _option(180.0, "time for running requests at the end", low=0)
    worker_startup_timeout_secs: float = _option(1800.0, "how long a worker may take to introduce itself", above=0)
    worker_startup_check_interval: float = _option(1.0, "time between two looks at a worker that starts", above=0)
    retry_max_retries: int = _option(5, "attempts", low=1, high=100)
    retry_initial_backoff_ms: float = _option(50.0, "first wait before the same worker is tried again", low=0)
    retry_max_backoff_ms: float = _option(30000.0, "longest wait", low=0)
    retry_backoff_multiplier: float = _option(1.5, "growth of the wait", low=1)
    retry_jitter_factor: float = _option(0.2, "random share of the wait", low=0, high=1)
    disable_retries: bool = _option(False, "one attempt")
    cb_failure_threshold: int = _option(3, "failures in a row that open a worker's breaker", low=1)
    cb_success_threshold: int = _option(1, "probes in a row that close it", low=1)
    cb_timeout_duration_secs: float = _option(30.0, "time from open to the first probe", low=0)
    disable_circuit_breaker: bool = _option(False, "no breaker")
    health_failure_threshold: int = _option(3, "failed checks that make a worker unhealthy", low=1)
    health_success_threshold: int = _option(2, "passed checks that make it healthy again", low=1)
    health_check_timeout_secs: float = _option(5.0, "time of a check", above=0)
    health_check_interval_secs: float = _option(60.0, "time between checks", above=0)
    health_check_endpoint: str = _option("/health", "path of a check")
    disable_health_check: bool = _option(False, "no checks")
    request_id_headers: tuple[str, ...] = _option(("x-request-id",), "headers that may hold a request's id")
    api_key: str | None = _option(None, "key that clients need; passed on to workers")
    log_level: str = _option("info", "amount of log", choices=("debug", "info", "warn", "error"))

    @property
    def is_paired(self) -> bool:
        """Whether requests go to prefill and decode workers."""
        return self.pd_disaggregation or bool(self.prefill or self.decode)

    def backoff(self, attempt: int, chance: float) -> float:
        """Seconds before ``attempt`` (1 for the second one); ``chance`` is in [0, 1)."""
        wait = min(
            self.retry_initial_backoff_ms * self.retry_backoff_multiplier ** (attempt - 1), self.retry_max_backoff_ms
        )
        return wait * (1 + self.retry_jitter_factor * (2 * chance - 1)) / 1000


REFUSED = (
    "service-discovery",
    "selector",
    "prefill-selector",
    "decode-selector",
    "service-discovery-port",
    "service-discovery-namespace",
    "max-concurrent-requests",
    "queue-size",
    "queue-timeout-secs",
    "rate-limit-tokens-per-second",
    "dp-aware",
    "migrate-streams",
    "tls-cert-path",
    "tls-key-path",
    "client-cert-path",
    "client-key-path",
    "ca-cert-paths",
    "control-plane-api-keys",
    "jwt-issuer",
    "jwt-audience",
    "jwt-jwks-uri",
    "jwt-role-mapping",
    "mcp-config-path",
    "history-backend",
    "backend",
    "enable-igw",
    "mini-lb",
    "workers",
    "prometheus-port",
    "prometheus-host",
    "cors-allowed-origins",
    "enable-trace",
    "otlp-traces-endpoint",
    "cb-window-duration-secs",
    "model-path",
    "tokenizer-path",
    "chat-template",
    "reasoning-parser",
    "tool-call-parser",
    "assignment-mode",
    "max-idle-secs",
    "bucket-adjust-interval-secs",
    "eviction-interval-secs",
    "log-dir",
)
"""Options of SGLang's router that this one does not have; giving one ends the start."""

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


def parse_options(words: Sequence[str]) -> RouterOptions:
    """Options from the words after ``router``; wrong ones print one line and exit with 2.

    Raises:
        StartupError: options that do not go together, or a file that cannot be used.
    """
    parser = argparse.ArgumentParser(
        prog=PROGRAM, description="One address for many workers.", argument_default=argparse.SUPPRESS
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML or YAML file; the command line wins")
    for item in fields(RouterOptions):
        _add(parser, item)
    for name in REFUSED:
        parser.add_argument(f"--{name}", dest=f"refused:{name}", nargs="*", help=argparse.SUPPRESS)
    given = vars(parser.parse_args(list(words)))
    for name in given:
        if name.startswith("refused:"):
            parser.error(f"argument --{name.removeprefix('refused:')}: not supported by {PROGRAM}; remove it")
    file = given.pop("config", None)
    if "prefill" in given:
        given["prefill"] = tuple(_prefill(parser, item) for item in given["prefill"])
    known = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    return checked(replace(RouterOptions(), **{**(read_file(file) if file else {}), **known}))


def checked(options: RouterOptions) -> RouterOptions:
    """``options`` with addresses in their normal form.

    Raises:
        StartupError: a value is out of bounds, an address is wrong or given twice, or pools are mixed.
    """
    for item in fields(RouterOptions):
        _check(item.name, getattr(options, item.name), item.metadata)
    try:
        regular = tuple(normalize_url(url) for url in options.worker_urls)
        prefill = tuple((normalize_url(url), port) for url, port in options.prefill)
        decode = tuple(normalize_url(url) for url in options.decode)
    except ValueError as error:
        raise StartupError(f"--worker-urls, --prefill or --decode: {error}") from None
    seen: set[str] = set()
    for url in (*regular, *(url for url, _ in prefill), *decode):
        if url in seen:
            raise StartupError(f"--worker-urls, --prefill or --decode: worker {url!r} is given twice")
        seen.add(url)
    if regular and options.is_paired:
        raise StartupError("--worker-urls: with prefill and decode workers give --prefill and --decode only")
    return replace(options, worker_urls=regular, prefill=prefill, decode=decode)


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


def _discovery(section: Any, found: dict[str, Any]) -> None:
    rest = dict(section) if isinstance(section, dict) else {}
    backend = rest.pop("backend", None)
    if backend == "k8s":
        check_selectors(rest)
        raise StartupError("--config: discovery.backend k8s is not supported yet; use static_urls or POST /workers")
    if backend != "static_urls":
        raise StartupError(f"--config: discovery.backend {backend!r}: must be static_urls or k8s")
    _take("discovery", rest, {"urls": "worker_urls"}, found)
    if isinstance(found.get("worker_urls"), list):
        found["worker_urls"] = tuple(found["worker_urls"])
    if not found.get("worker_urls") or not all(isinstance(url, str) and url.strip() for url in found["worker_urls"]):
        raise StartupError("--config: discovery.urls must be a list of addresses that are not empty")


def check_selectors(section: Mapping[str, Any]) -> None:
    """Label selectors of Kubernetes: one for all workers, or one each for prefill and decode.

    Raises:
        StartupError: both kinds, half of a pair, equal ones, or anything but ``label=value`` terms.
    """
    one, prefill, decode = (section.get(name) for name in ("label_selector", "prefill_selector", "decode_selector"))
    if one is not None and (prefill is not None or decode is not None):
        raise StartupError("--config: discovery.label_selector goes without prefill_selector and decode_selector")
    if one is None and (prefill is None or decode is None):
        raise StartupError("--config: discovery needs label_selector, or prefill_selector and decode_selector")
    for name in ("label_selector", "prefill_selector", "decode_selector"):
        if (text := section.get(name)) is None:
            continue
        for term in str(text).split(","):
            label, separator, value = term.partition("=")
            if not separator or not label.strip() or label.strip().endswith("!") or not value.lstrip("=").strip():
                raise StartupError(f"--config: discovery.{name} {text!r}: must be label=value[,label=value...]")
    if one is None and sorted(str(prefill).split(",")) == sorted(str(decode).split(",")):
        raise StartupError("--config: discovery.prefill_selector and decode_selector must differ")


def _take(name: str, section: Any, names: Mapping[str, str], found: dict[str, Any]) -> None:
    if not isinstance(section, dict):
        raise StartupError(f"--config: {name} must be a table")
    for key, value in section.items():
        if key not in names:
            raise StartupError(f"--config: unknown field {name}.{key} (known: {', '.join(names)})")
        found[names[key]] = value


def _add(parser: argparse.ArgumentParser, item: Any) -> None:
    flag, text = f"--{item.name.replace('_', '-')}", item.metadata["help"]
    default = f" (default: {item.default})" if item.default not in (None, (), False) else ""
    if item.name == "prefill":
        parser.add_argument(flag, nargs="+", action="append", metavar="URL", help=text)
    elif item.name == "decode":
        parser.add_argument(flag, action="append", metavar="URL", help=text)
    elif isinstance(item.default, bool):
        parser.add_argument(flag, action="store_true", help=text)
    elif isinstance(item.default, tuple):
        parser.add_argument(flag, nargs="*", metavar="TEXT", help=text)
    else:
        kind = type(item.default) if item.default is not None else str
        parser.add_argument(flag, type=kind, choices=item.metadata.get("choices"), help=f"{text}{default}")


def _prefill(parser: argparse.ArgumentParser, words: Sequence[str]) -> tuple[str, int | None]:
    if len(words) > 2 or (len(words) == 2 and words[1] != "none" and not words[1].isdigit()):
        parser.error(f"argument --prefill: {' '.join(words)!r}: must be URL [BOOTSTRAP_PORT or none]")
    return words[0], int(words[1]) if len(words) == 2 and words[1] != "none" else None


def _check(name: str, value: Any, metadata: Mapping[str, Any]) -> None:
    flag = f"--{name.replace('_', '-')}"
    choices = metadata.get("choices")
    if choices and value is not None and value not in choices:
        raise StartupError(f"{flag} {value!r}: must be one of {', '.join(choices)}")
    bounds = [metadata.get(bound) for bound in ("low", "high", "above")]
    if all(bound is None for bound in bounds):
        return
    low, high, above = bounds
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise StartupError(f"{flag} {value!r}: must be a number")
    wrong = (low is not None and value < low) or (high is not None and value > high)
    if wrong or (above is not None and value <= above) or value != value:
        allowed = [
            f"{word} {bound}"
            for word, bound in zip(("at least", "at most", "above"), bounds, strict=True)
            if bound is not None
        ]
        raise StartupError(f"{flag} {value}: must be {' and '.join(allowed)}")
