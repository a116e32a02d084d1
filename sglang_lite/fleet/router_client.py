"""What the fleet asks of a router: to take a worker in, and to forget it."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

import aiohttp
import msgspec

from sglang_lite.fleet.server_process import Endpoint
from sglang_lite.fleet.spec import Role

_SECONDS = 10.0


class RouterUnreachableError(Exception):
    """The router did not answer, or not as a router does."""


class KnownWorker(msgspec.Struct):
    """A worker as the router lists it. With ``--dp-aware`` a server is listed once a rank, as ``URL@RANK``."""

    id: str
    url: str
    is_registered: bool = True

    @property
    def server(self) -> str:
        """Address of the server."""
        url, separator, rank = self.url.rpartition("@")
        return url if separator and rank.isdecimal() else self.url


class _Listing(msgspec.Struct):
    workers: list[KnownWorker]


class RouterClient:
    """Calls to the router at ``url``; ``api_key`` opens it and the workers."""

    def __init__(self, url: str, api_key: str | None) -> None:
        self.url = url.rstrip("/")
        self._api_key = api_key
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._session = aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=_SECONDS))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    async def is_alive(self) -> bool:
        """Whether the router answers at all."""
        try:
            async with self._session.get(self.url + "/healthz") as response:
                return response.status == 200
        except (aiohttp.ClientError, OSError, TimeoutError):
            return False

    async def workers(self) -> dict[str, KnownWorker]:
        """What the router knows, by the address of the server.

        Raises:
            RouterUnreachableError: it did not say.
        """
        status, body = await self._call("GET", "/workers")
        if status != 200:
            raise RouterUnreachableError(f"{self.url}/workers answered {status}: {body[:200]!r}")
        try:
            found = msgspec.json.decode(body, type=_Listing).workers
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise RouterUnreachableError(f"{self.url}/workers: not the answer of a router: {error}") from None
        return {worker.server: worker for worker in found}

    async def add(self, endpoint: Endpoint, role: Role, name: str) -> None:
        """Have the router use a worker; another ``name`` or process at the same address is another worker.

        Raises:
            RouterUnreachableError: it cannot be reached, or refuses.
        """
        body: dict[str, Any] = {
            "url": endpoint.url,
            "worker_type": "regular" if role == "plain" else role,
            "labels": {"instance": f"{name}:{endpoint.process_id}"},
        }
        if endpoint.bootstrap_port is not None:
            body["bootstrap_port"] = endpoint.bootstrap_port
        if self._api_key:
            body["api_key"] = self._api_key
        status, answer = await self._call("POST", "/workers", msgspec.json.encode(body))
        if status not in (200, 201, 202):
            raise RouterUnreachableError(f"{self.url}/workers refused {endpoint.url}: {status} {answer[:200]!r}")

    async def remove(self, endpoint: Endpoint) -> None:
        """Have the router send it nothing more; fine when it does not know it.

        Raises:
            RouterUnreachableError: it cannot be reached, or refuses.
        """
        worker = (await self.workers()).get(endpoint.url)
        if worker is None:
            return
        status, answer = await self._call("DELETE", f"/workers/{worker.id}")
        if status not in (200, 202, 404):
            raise RouterUnreachableError(f"{self.url}/workers kept {endpoint.url}: {status} {answer[:200]!r}")

    async def _call(self, method: str, path: str, data: bytes | None = None) -> tuple[int, bytes]:
        try:
            headers = {"content-type": "application/json"} if data else {}
            async with self._session.request(method, self.url + path, data=data, headers=headers) as response:
                return response.status, await response.read()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise RouterUnreachableError(f"{self.url}{path}: {type(error).__name__} {error}") from None
