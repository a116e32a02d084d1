"""Options of ``sglang-lite router``: the command line of SGLang's router, and a TOML or YAML file."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from sglang_lite.router.discovery_options import DiscoveryOptions, check_discovery
from sglang_lite.router.option_file import read_file
from sglang_lite.router.option_groups import AccessOptions, HedgeOptions, LimitOptions, PolicyOptions, option
from sglang_lite.router.workers import normalize_url
from sglang_lite.types import StartupError

PROGRAM = "sglang-lite router"
API_KEY_VARIABLE = "SGLANG_LITE_API_KEY"
"""Holds ``--api-key``, as it does for ``sglang-lite serve``."""


@dataclass(frozen=True, slots=True)
class RouterOptions(PolicyOptions, HedgeOptions, LimitOptions, AccessOptions, DiscoveryOptions):
    """All options. Times are in seconds unless the name says otherwise, sizes in bytes."""

    host: str = option("0.0.0.0", "address to listen on")
    port: int = option(30000, "port to listen on", low=0, high=65535)
    workers: int = option(1, "processes of the router on this port", low=1, high=256)
    worker_urls: tuple[str, ...] = option((), "addresses of workers")
    pd_disaggregation: bool = option(False, "prefill and decode workers apart")
    prefill: tuple[tuple[str, int | None], ...] = option((), "URL [BOOTSTRAP_PORT], repeatable")
    decode: tuple[str, ...] = option((), "URL, repeatable")
    dp_aware: bool = option(False, "every data-parallel rank of a server is a worker of its own")
    models: tuple[str, ...] = option((), "models that are served, with workers or (for now) without")
    request_timeout_secs: float = option(300.0, "time to a whole answer, or between two parts of a stream", above=0)
    stale_request_timeout_secs: float = option(600.0, "longest life of a request", above=0)
    shutdown_grace_period_secs: float = option(180.0, "time for running requests at the end", low=0)
    worker_startup_timeout_secs: float = option(1800.0, "how long a worker may take to introduce itself", above=0)
    worker_startup_check_interval: float = option(1.0, "time between two looks at a worker that starts", above=0)
    retry_max_retries: int = option(5, "attempts", low=1, high=100)
    retry_initial_backoff_ms: float = option(50.0, "first wait before the same worker is tried again", low=0)
    retry_max_backoff_ms: float = option(30000.0, "longest wait", low=0)
    retry_backoff_multiplier: float = option(1.5, "growth of the wait", low=1)
    retry_jitter_factor: float = option(0.2, "random share of the wait", low=0, high=1)
    disable_retries: bool = option(False, "one attempt")
    migrate_streams: bool = option(False, "a stream whose worker breaks goes on at another one")
    cb_failure_threshold: int = option(3, "failures in a row that open a worker's breaker", low=1)
    cb_success_threshold: int = option(1, "probes in a row that close it", low=1)
    cb_timeout_duration_secs: float = option(30.0, "time from open to the first probe", low=0)
    disable_circuit_breaker: bool = option(False, "no breaker")
    health_failure_threshold: int = option(3, "failed checks that make a worker unhealthy", low=1)
    health_success_threshold: int = option(2, "passed checks that make it healthy again", low=1)
    health_check_timeout_secs: float = option(5.0, "time of a check", above=0)
    health_check_interval_secs: float = option(60.0, "time between checks", above=0)
    health_check_endpoint: str = option("/health", "path of a check")
    disable_health_check: bool = option(False, "no checks")
    log_level: str = option("info", "amount of log", choices=("debug", "info", "warn", "error"))

    @property
    def is_paired(self) -> bool:
        """Whether requests go to prefill and decode workers."""
        return self.pd_disaggregation or bool(self.prefill or self.decode or self.prefill_selector)

    @property
    def is_hedging(self) -> bool:
        """Whether requests may go to a second worker."""
        return self.hedge_after_secs is not None or self.hedge_quantile is not None

    def backoff(self, attempt: int, chance: float) -> float:
        """Seconds before ``attempt`` (1 for the second one); ``chance`` is in [0, 1)."""
        wait = min(
            self.retry_initial_backoff_ms * self.retry_backoff_multiplier ** (attempt - 1), self.retry_max_backoff_ms
        )
        return wait * (1 + self.retry_jitter_factor * (2 * chance - 1)) / 1000


REFUSED = (
    "jwt-issuer",
    "jwt-audience",
    "jwt-jwks-uri",
    "jwt-role-mapping",
    "mcp-config-path",
    "history-backend",
    "backend",
    "enable-igw",
    "mini-lb",
    "prometheus-port",
    "prometheus-host",
    "enable-trace",
    "otlp-traces-endpoint",
    "cb-window-duration-secs",
    "reasoning-parser",
    "tool-call-parser",
    "eviction-interval-secs",
    "log-dir",
)
"""Options of SGLang's router that this one does not have; giving one ends the start."""


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
    if key := os.environ.get(API_KEY_VARIABLE):  # a command line can be read by everybody on the machine
        known.setdefault("api_key", key)
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
    apart = {options.policy, options.prefill_policy, options.decode_policy} & {"bucket", "manual"}
    if options.workers > 1 and apart:
        raise StartupError(f"--workers {options.workers}: policy {apart.pop()} needs one process; remove one of them")
    if options.workers > 1 and (options.max_concurrent_requests > 0 or options.rate_limit_tokens_per_second):
        raise StartupError(
            f"--workers {options.workers}: each process would count for itself under --max-concurrent-requests and "
            "--rate-limit-tokens-per-second; run one process with limits"
        )
    if options.migrate_streams and (options.disable_retries or options.is_paired):
        other = "--disable-retries" if options.disable_retries else "prefill and decode workers"
        raise StartupError(f"--migrate-streams: cannot be had with {other}; remove one of them")
    _check_hedging(options)
    if options.dp_aware and options.is_paired:
        raise StartupError("--dp-aware: prefill and decode servers choose their ranks themselves; remove it")
    if regular and options.is_paired:
        raise StartupError("--worker-urls: with prefill and decode workers give --prefill and --decode only")
    check_discovery(options)
    return replace(options, worker_urls=regular, prefill=prefill, decode=decode)


def _check_hedging(options: RouterOptions) -> None:
    if options.is_hedging and options.is_paired:
        name = "--hedge-quantile" if options.hedge_after_secs is None else "--hedge-after-secs"
        raise StartupError(f"{name}: cannot be had with prefill and decode workers; remove one of them")
    after = options.hedge_after_secs
    if after is not None and after >= options.request_timeout_secs:
        raise StartupError(
            f"--hedge-after-secs {after:g}: must be below --request-timeout-secs {options.request_timeout_secs:g}"
        )


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
        kind = item.metadata.get("kind") or (type(item.default) if item.default is not None else str)
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
    if all(bound is None for bound in bounds) or (value is None and "kind" in metadata):
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
