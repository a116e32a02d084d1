"""Who may call what: keys of clients, of tenants and of operators. Keys are compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from aiohttp import web

from sglang_lite.router.errors import RouterError
from sglang_lite.router.option_groups import AccessOptions
from sglang_lite.server.auth import presented_key
from sglang_lite.server.tenants import Tenants
from sglang_lite.types import StartupError

logger = logging.getLogger(__name__)

OPEN = frozenset({"/health", "/healthz", "/liveness", "/readyz", "/readiness", "/metrics"})
"""Routes without a key: what load balancers and Prometheus ask."""

ROLES = ("admin", "user")
_NEEDS_KEY = "A valid API key is needed: send Authorization: Bearer KEY, or x-api-key: KEY."


@dataclass(frozen=True, slots=True)
class Operator:
    """Owner of a control plane key. Only the role ``admin`` may call the control plane."""

    id: str
    name: str
    role: str


@dataclass(frozen=True, slots=True)
class Caller:
    """Who a call comes from.

    Attributes:
        operator: whose control plane key was given, if one was.
        replaces_key: the key that was given is the router's business: workers get another one, or none.
    """

    operator: Operator | None = None
    replaces_key: bool = False


NOBODY = Caller()
CALLER = web.RequestKey("caller", Caller)
"""Key of a request under which its ``Caller`` is kept."""


class KeyRing:
    """Keys with their owners. A look-up compares all keys, whichever is right."""

    def __init__(self, keys: Sequence[tuple[str, Any]]) -> None:
        self._entries = [(_digest(key), owner) for key, owner in keys]

    def __len__(self) -> int:
        return len(self._entries)

    def owner(self, given: str) -> Any:
        """Whose key ``given`` is; None for nobody's."""
        digest, found = _digest(given), None
        for expected, owner in self._entries:
            if hmac.compare_digest(digest, expected):
                found = owner
        return found if given else None


class Access:
    """The rules of one router.

    Args:
        options: with the keys.
        data_routes: routes that clients use; every other one, if not ``OPEN``, belongs to the control plane.

    Raises:
        StartupError: a key or the tenants are declared wrongly.
    """

    def __init__(self, options: AccessOptions, data_routes: frozenset[str] = frozenset()) -> None:
        self._data_routes = data_routes
        self._api_key = options.api_key
        self._audit = options.control_plane_audit_enabled
        self._operators = KeyRing([_operator(text) for text in options.control_plane_api_keys])
        self.tenants = _tenants(options.tenants)
        tenant_keys = list(self.tenants.keys) if self.tenants is not None else []
        own = [options.api_key] if options.api_key else []
        self._closed = bool(own or tenant_keys)
        self._clients = KeyRing([(key, key) for key in (*own, *tenant_keys)])
        self._keyless = not len(self._clients) and not len(self._operators) and not self._audit

    @property
    def worker_key(self) -> str | None:
        """The key that workers get instead of one that is the router's own business."""
        return self._api_key

    def check(self, method: str, route: str, headers: Mapping[str, str]) -> Caller:
        """Let a call of ``route`` (its pattern) pass.

        Raises:
            RouterError: unauthorized, or forbidden for an operator without the role it takes.
        """
        if route in OPEN or self._keyless:
            return NOBODY
        given = presented_key(headers)
        operator = self._operators.owner(given)
        client = self._clients.owner(given)
        caller = Caller(operator, replaces_key=operator is not None or (client is not None and client != self._api_key))
        if route in self._data_routes:
            if self._closed and client is None and operator is None:
                raise _unauthorized(_NEEDS_KEY)
            return caller
        if not len(self._operators):
            if self._closed and (client is None or client != self._api_key):
                raise _unauthorized(_NEEDS_KEY)
            return caller
        if self._audit:
            logger.info("control plane: %s %s by %s", method, route, operator.id if operator else "an unknown key")
        if operator is None:
            raise _unauthorized(f"{route} needs a control plane key: Authorization: Bearer KEY.")
        if operator.role != "admin":
            raise RouterError(
                "forbidden",
                f"This call needs a control plane key of the role admin (--control-plane-api-keys); the key that came "
                f"has the role {operator.role}.",
            )
        return caller


def _unauthorized(message: str) -> RouterError:
    return RouterError("unauthorized", message, {"www-authenticate": "Bearer"})


def _operator(text: str) -> tuple[str, Operator]:
    parts = text.split(":", 3)
    if len(parts) != 4 or not all(part.strip() for part in parts):
        raise StartupError("--control-plane-api-keys: each must be ID:NAME:ROLE:KEY")  # the text is a secret
    identity, name, role, key = parts
    if role not in ROLES:
        raise StartupError(f"--control-plane-api-keys: {identity}: role {role!r} must be one of {', '.join(ROLES)}")
    return key, Operator(identity, name, role)


def _tenants(text: str | None) -> Tenants | None:
    if text is None:
        return None
    try:
        declared = msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise StartupError(f"--tenants: must be a JSON object of names and weights: {error}") from None
    return Tenants(declared)


def _digest(key: str) -> bytes:
    # Bytes of a header that are no UTF-8 arrive as lone surrogates. Digests have one length, whatever was given.
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
