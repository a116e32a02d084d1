"""Options of discovery in Kubernetes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sglang_lite.router.kubernetes_objects import RESOURCES
from sglang_lite.router.option_groups import option
from sglang_lite.types import StartupError

SELECTORS = ("selector", "prefill_selector", "decode_selector")


@dataclass(frozen=True)
class DiscoveryOptions:
    """Which pods are workers."""

    service_discovery: bool = option(False, "find workers among the pods of this Kubernetes cluster")
    selector: tuple[str, ...] = option((), "label=value terms that workers have")
    prefill_selector: tuple[str, ...] = option((), "label=value terms of prefill workers")
    decode_selector: tuple[str, ...] = option((), "label=value terms of decode workers")
    service_discovery_port: int | None = option(
        None, "port of workers (default: 80, or that of the EndpointSlice)", low=1, high=65535, kind=int
    )
    service_discovery_namespace: str | None = option(None, "namespace (default: all)")
    service_discovery_resource: str = option("pods", "what is watched", choices=tuple(RESOURCES))
    service_discovery_protocol: str = option("http", "protocol of workers", choices=("http", "https", "grpc", "grpcs"))


def check_discovery(options: DiscoveryOptions) -> None:
    """Raises StartupError for selectors that do not go together, and options without effect."""
    given = {name: getattr(options, name) for name in SELECTORS}
    if options.service_discovery:
        check_selectors({name: ",".join(words) if words else None for name, words in given.items()})
        return
    for name in (*SELECTORS, "service_discovery_port", "service_discovery_namespace"):
        if getattr(options, name):
            flag = name.replace("_", "-")
            raise StartupError(f"--{flag} has an effect with --service-discovery only; add it, or leave --{flag} out")


def check_selectors(section: Mapping[str, Any]) -> None:
    """Label selectors of Kubernetes: one for all workers, or one each for prefill and decode.

    Raises:
        StartupError: both kinds, half of a pair, equal ones, or anything but ``label=value`` terms.
    """
    one, prefill, decode = (section.get(name) for name in SELECTORS)
    if one is not None and (prefill is not None or decode is not None):
        raise StartupError("--selector (discovery.label_selector) goes without prefill_selector and decode_selector")
    if one is None and (prefill is None or decode is None):
        raise StartupError("--service-discovery needs --selector, or --prefill-selector and --decode-selector")
    for name in SELECTORS:
        if section.get(name) is not None:
            in_file = "label_selector" if name == "selector" else name
            _check_terms(f"--{name.replace('_', '-')} ({in_file})", str(section[name]))
    if one is None and _terms(str(prefill)) == _terms(str(decode)):
        raise StartupError("--prefill-selector and --decode-selector must differ")


def _terms(text: str) -> Sequence[str]:
    return sorted(term.strip() for term in text.split(","))


def _check_terms(flag: str, text: str) -> None:
    for term in text.split(","):
        label, separator, value = term.partition("=")
        value = value.removeprefix("=")  # == is = too
        is_set_based = any(sign in f"{label.strip()}{value.strip()}" for sign in "=!()<> \t")
        if not separator or not label.strip() or not value.strip() or is_set_based:
            raise StartupError(f"{flag} {text!r}: must be label=value[,label=value...]")
