"""The Kubernetes API as far as discovery needs it: list and watch, with the service account of the pod."""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import aiohttp
import msgspec

from sglang_lite.router.body import NOT_READ
from sglang_lite.types import StartupError

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where Kubernetes puts token and authority of a pod's service account."""
_PAGE = "500"
_WATCH_SECONDS = 300
_SILENCE_SECONDS = _WATCH_SECONDS + 15.0
"""The server ends a watch in time; a connection that is silent for longer is dead."""
_LIST_SECONDS = 30.0
_LINE_BYTES = 4 * 1024 * 1024
_MOST_OBJECTS = 100_000
"""Of a list; a router has room for far fewer workers."""
_GONE = 410


class ApiError(Exception):
    """An answer that is no success. ``status`` is its code, 0 for one that cannot be read."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"status {status}: {message}" if status else message)
        self.status = status

    @property
    def is_gone(self) -> bool:
        """Whether the version that was asked for is too old: only a new list helps."""
        return self.status == _GONE


@dataclass(frozen=True, slots=True)
class ClusterAccess:
    """Where the API server is, and how a pod shows who it is.

    Attributes:
        url: without a slash at the end.
        token: file with the token, which Kubernetes renews: it is read for every call.
        authority: file with the certificate of the API server's authority; None for those of the system.
    """

    url: str
    token: Path
    authority: Path | None = None

    @classmethod
    def in_cluster(cls, environment: Mapping[str, str] = os.environ, account: Path | None = None) -> Self:
        """That of the pod of this process; ``account`` is ``ACCOUNT`` unless given.

        Raises:
            StartupError: it runs in no pod, or in one without a service account.
        """
        host, port = environment.get("KUBERNETES_SERVICE_HOST"), environment.get("KUBERNETES_SERVICE_PORT", "443")
        token, authority = ((account or ACCOUNT) / name for name in ("token", "ca.crt"))
        if not host:
            raise StartupError("--service-discovery: no pod of Kubernetes: KUBERNETES_SERVICE_HOST is not set")
        for file in (token, authority):
            if not file.is_file():
                raise StartupError(f"--service-discovery: {file} is missing; the pod needs a service account")
        return cls(f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}", token, authority)


class KubernetesApi:
    """A client of one API server. ``async with`` opens and closes it."""

    def __init__(self, access: ClusterAccess) -> None:
        self._access = access
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        authority = self._access.authority
        trusted = True if authority is None else ssl.create_default_context(cafile=str(authority))
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=trusted),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=10.0),
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        return self

    async def __aexit__(self, *exception: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def list(self, path: str, selector: str) -> tuple[list[dict[str, Any]], str]:
        """All objects at ``path`` with the labels of ``selector``, and the version of the list.

        Raises:
            ApiError, aiohttp.ClientError, OSError, TimeoutError: there is no list.
        """
        found: list[dict[str, Any]] = []
        query = {"labelSelector": selector, "limit": _PAGE}
        while True:
            async with asyncio.timeout(_LIST_SECONDS), await self._get(path, query, _LIST_SECONDS) as response:
                body = _decoded(await response.read())
            items, head = body.get("items"), body.get("metadata")
            found += [item for item in items if isinstance(item, dict)] if isinstance(items, list) else []
            if len(found) > _MOST_OBJECTS:
                raise ApiError(0, f"more than {_MOST_OBJECTS} objects have the labels {selector}")
            head = head if isinstance(head, dict) else {}
            if not head.get("continue"):
                return found, str(head.get("resourceVersion", ""))
            query["continue"] = str(head["continue"])

    async def watch(self, path: str, selector: str, version: str) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        """Changes since ``version``, as (type, object), until the server ends the watch.

        Raises:
            ApiError: refused, or an ERROR event; ``is_gone`` when the version is too old.
            aiohttp.ClientError, OSError, TimeoutError: the connection broke.
        """
        query = {
            "labelSelector": selector,
            "watch": "1",
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(_WATCH_SECONDS),
        }
        async with await self._get(path, query, _SILENCE_SECONDS) as response:
            pending = bytearray()
            async for part in response.content.iter_any():
                pending += part
                *lines, rest = pending.split(b"\n")
                pending = rest
                if len(pending) > _LINE_BYTES:
                    raise ApiError(0, f"an event is longer than {_LINE_BYTES} bytes")
                for line in lines:
                    if line.strip():
                        yield _event(bytes(line))

    async def _get(self, path: str, query: Mapping[str, str], silence: float) -> aiohttp.ClientResponse:
        assert self._session is not None
        token = (await asyncio.to_thread(self._access.token.read_text, encoding="utf-8", errors="replace")).strip()
        if not token.isascii() or not token.isprintable():
            raise ApiError(0, f"{self._access.token} holds no token")
        response = await self._session.get(
            self._access.url + path,
            params=query,
            headers={"authorization": f"Bearer {token}", "accept": "application/json"},
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=10.0, sock_read=silence),
        )
        if response.status == 200:
            return response
        async with response:
            data = await response.content.read(4096)
        raise ApiError(response.status, data.decode("utf-8", "replace")[:500])


def _decoded(data: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(data, type=dict[str, Any])
    except NOT_READ as error:
        raise ApiError(0, f"an answer is no JSON object: {error}") from None


def _event(line: bytes) -> tuple[str, dict[str, Any]]:
    event = _decoded(line)
    kind, value = event.get("type"), event.get("object")
    if not isinstance(kind, str) or not isinstance(value, dict):
        raise ApiError(0, "an event has no type or no object")
    if kind == "ERROR":
        code = value.get("code")
        raise ApiError(code if isinstance(code, int) else 0, str(value.get("message", "")))
    return kind, value
