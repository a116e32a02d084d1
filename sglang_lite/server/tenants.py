"""Who pays for a request under ``--fair-scheduling``: by API key, or by the ``x-tenant`` header."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang_lite.frontend.request import GenerateRequest
from sglang_lite.server.auth import is_key, presented_key
from sglang_lite.types import StartupError

if TYPE_CHECKING:
    from sglang_lite.config import ServerConfig

HEADER = "x-tenant"
_MAX_NAME = 128


@dataclass(slots=True, frozen=True)
class Tenant:
    """One who shares the engine; the empty name is everybody who gives none."""

    name: str = ""
    weight: float = 1.0


SHARED = Tenant()
_current: ContextVar[Tenant] = ContextVar("tenant", default=SHARED)


class Tenants:
    """The tenants of ``--tenants``, and those that callers name themselves.

    A key proves who calls and wins over the header. Where tenants are declared, a header can only name one that is
    declared and has no key of its own: with invented names, one caller could otherwise take many shares. Where none
    are, the header is trusted, as behind a gateway that sets it.

    Raises:
        StartupError: a declaration is wrong.
    """

    def __init__(self, declared: Mapping[str, Any] | None) -> None:
        self._by_name: dict[str, Tenant] = {}
        self._keys: dict[str, str] = {}
        for name, value in (declared or {}).items():
            weight, key = _read_declaration(name, value)
            self._by_name[name] = Tenant(name, weight)
            if key is not None:
                if key in self._keys.values():
                    raise StartupError(f"--tenants: {name!r} has the api_key of another tenant; each needs its own")
                self._keys[name] = key

    @classmethod
    def of(cls, config: ServerConfig) -> Tenants:
        """Those of a configuration."""
        return cls(config.tenants)

    @property
    def keys(self) -> Sequence[str]:
        """The keys that open the normal routes."""
        return list(self._keys.values())

    def of_call(self, headers: Mapping[str, str]) -> Tenant:
        """Who calls."""
        given = presented_key(headers)
        if given and self._keys:
            for name, key in self._keys.items():
                if is_key(given, [key]):
                    return self._by_name[name]
        named = headers.get(HEADER, "")[:_MAX_NAME]
        if not self._by_name:
            return Tenant(named.encode("utf-8", "replace").decode())
        return SHARED if named in self._keys else self._by_name.get(named, SHARED)


def _read_declaration(name: str, value: Any) -> tuple[float, str | None]:
    weight, key = value, None
    if isinstance(value, dict):
        unknown = sorted(value.keys() - {"weight", "api_key"})
        if unknown:
            raise StartupError(f"--tenants: {name!r} has the unknown key {unknown[0]!r}; allowed are weight, api_key")
        weight, key = value.get("weight", 1.0), value.get("api_key")
    if not name or len(name) > _MAX_NAME:
        raise StartupError(f"--tenants: a name needs 1 to {_MAX_NAME} characters, got {len(name)}")
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight) or weight <= 0:
        raise StartupError(f"--tenants: the weight of {name!r} must be a number above 0, got {weight!r}")
    if key is not None and (not isinstance(key, str) or not key.strip()):
        raise StartupError(f"--tenants: the api_key of {name!r} must be a text that is not empty")
    return float(weight), key


def enter_tenant(tenant: Tenant) -> None:
    """What the running call asks of the engine from now on is ``tenant``'s."""
    _current.set(tenant)


def assign_tenant(requests: Sequence[GenerateRequest]) -> None:
    """Note in ``requests`` who pays for them."""
    tenant = _current.get()
    for request in requests:
        request.tenant, request.tenant_weight = tenant.name, tenant.weight
