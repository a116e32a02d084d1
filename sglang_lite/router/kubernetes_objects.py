"""Workers out of pods and EndpointSlices. No I/O."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

PORT_ANNOTATION = "sglang.ai/bootstrap-port"
RESOURCES = {"pods": "api/v1", "endpointslices": "apis/discovery.k8s.io/v1"}
"""What may be watched -> its group of the API."""
_POD_PORT = 80


@dataclass(frozen=True, slots=True)
class Found:
    """A worker that can take requests now. ``bootstrap_port`` is None where nothing says it."""

    url: str
    bootstrap_port: int | None = None


def resource_path(resource: str, namespace: str | None) -> str:
    """Where the API has the objects of a namespace, or of all."""
    scope = f"namespaces/{namespace}/" if namespace else ""
    return f"/{RESOURCES[resource]}/{scope}{resource}"


def key_of(value: Mapping[str, Any]) -> str:
    """What an object is known by: another one of the same name is another object."""
    head = _map(value.get("metadata"))
    return str(head.get("uid") or f"{head.get('namespace')}/{head.get('name')}")


def version_of(value: Mapping[str, Any]) -> str | None:
    """The version of an object, from which a watch may go on."""
    version = _map(value.get("metadata")).get("resourceVersion")
    return str(version) if version else None


def workers_of(resource: str, value: Mapping[str, Any], protocol: str, port: int | None) -> list[Found]:
    """The workers of an object that are ready and not about to end.

    Args:
        resource: of ``RESOURCES``.
        protocol: scheme of the workers' addresses.
        port: of the workers; None for 80 at pods, and the slice's own first port.
    """
    if _map(value.get("metadata")).get("deletionTimestamp"):
        return []
    bootstrap = _bootstrap_port(value)
    hosts = _pod_hosts(value) if resource == "pods" else _slice_hosts(value)
    number = port if port is not None else _POD_PORT if resource == "pods" else _slice_port(value)
    if number is None:
        return []
    names = (f"[{host}]" if ":" in host else host for host in hosts)
    return [Found(f"{protocol}://{name}:{number}", bootstrap) for name in names]


def _map(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _maps(value: Any) -> Iterator[Mapping[str, Any]]:
    yield from (item for item in value if isinstance(item, Mapping)) if isinstance(value, list) else ()


def _pod_hosts(pod: Mapping[str, Any]) -> Iterator[str]:
    status = _map(pod.get("status"))
    conditions = {str(entry.get("type")): entry.get("status") for entry in _maps(status.get("conditions"))}
    address = status.get("podIP")
    if conditions.get("Ready") == "True" and status.get("phase") == "Running" and isinstance(address, str) and address:
        yield address


def _slice_hosts(value: Mapping[str, Any]) -> Iterator[str]:
    if value.get("addressType") not in ("IPv4", "IPv6", None):
        return
    for endpoint in _maps(value.get("endpoints")):
        conditions = _map(endpoint.get("conditions"))
        # An absent condition is to be read as ready.
        if conditions.get("ready") is False or conditions.get("terminating") is True:
            continue
        addresses = endpoint.get("addresses")
        if isinstance(addresses, list) and addresses and isinstance(addresses[0], str):
            yield addresses[0]  # all addresses of an endpoint are the same pod


def _slice_port(value: Mapping[str, Any]) -> int | None:
    ports = [entry.get("port") for entry in _maps(value.get("ports")) if entry.get("protocol", "TCP") == "TCP"]
    return next((port for port in ports if isinstance(port, int) and 0 < port < 65536), None)


def _bootstrap_port(value: Mapping[str, Any]) -> int | None:
    text = str(_map(_map(value.get("metadata")).get("annotations")).get(PORT_ANNOTATION, ""))
    is_number = text.isascii() and text.isdecimal() and len(text) < 6
    return int(text) if is_number and 0 < int(text) < 65536 else None
