"""Telling routers that this server is there: at the start, again when a router has forgotten it, and at the end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
import socket
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec

from sglang_lite.config import ServerConfig
from sglang_lite.types import StartupError

logger = logging.getLogger(__name__)

LOOK_SECONDS = 5.0
"""Between two questions whether a router still knows this server."""
_CALL_SECONDS = 3.0
_FIRST_WAIT, _LONGEST_WAIT = 0.5, 15.0
_WILDCARDS = ("", "0.0.0.0", "::")


class _RefusedError(Exception):
    """A router that answered something else than it should."""


def check_fleet_options(config: ServerConfig) -> None:
    """Raises StartupError for addresses that are none, and options that have no effect."""
    for url in config.router_url or ():
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise StartupError(f"--router-url {url!r}: must be http://HOST[:PORT] or https://HOST[:PORT]")
    if config.router_url:
        if config.advertise_url is not None and not urlsplit(config.advertise_url).hostname:
            raise StartupError(f"--advertise-url {config.advertise_url!r}: must be an address such as http://HOST:PORT")
        return
    for flag, value in (("--advertise-url", config.advertise_url), ("--router-api-key", config.router_api_key)):
        if value is not None:
            raise StartupError(f"{flag} has an effect with --router-url only; add it, or leave {flag} out")


def advertised_url(config: ServerConfig, port: int, router: str) -> str:
    """The address of this server for ``router``.

    Raises:
        OSError: the server listens everywhere, and the host of the router cannot be found.
    """
    if config.advertise_url is not None:
        return config.advertise_url.rstrip("/")
    scheme = "grpc" if config.grpc_mode else "http"
    if config.ssl_certfile is not None:
        scheme += "s"
    host = config.host
    if host in _WILDCARDS:
        parts = urlsplit(router)
        family, kind, *_, address = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing: it only asks which interface leads there
            host = probe.getsockname()[0]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


class RouterRegistrations:
    """The registrations of one server, one a router. ``start`` returns at once; ``leave`` ends them.

    Args:
        config: of the server.
        port: it listens on.
        look_seconds: between two questions whether a router still knows this server.
    """

    def __init__(self, config: ServerConfig, port: int, *, look_seconds: float = LOOK_SECONDS) -> None:
        self._config = config
        self._port = port
        self._look_seconds = look_seconds
        self._instance = secrets.token_hex(8)
        self._ids: dict[str, str] = {}  # router -> what it calls this server
        self._tasks: list[asyncio.Task[None]] = []
        self._registering: set[asyncio.Task[None]] = set()
        self._session: aiohttp.ClientSession | None = None

    def start(self) -> None:
        """Begin to register, and to see to it that the registrations last."""
        if not self._config.router_url:
            return
        key = self._config.router_api_key
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self._session = aiohttp.ClientSession(
            headers=headers, timeout=aiohttp.ClientTimeout(total=_CALL_SECONDS), cookie_jar=aiohttp.DummyCookieJar()
        )
        urls = dict.fromkeys(url.rstrip("/") for url in self._config.router_url)
        self._tasks = [asyncio.create_task(self._keep(self._session, url)) for url in urls]

    async def leave(self) -> None:
        """Tell the routers that nothing more is to be sent here. Takes seconds at most, whatever they do."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, *self._registering, return_exceptions=True)
        if self._session is None:
            return
        session, self._session = self._session, None
        try:
            await asyncio.gather(*(self._delete(session, router, name) for router, name in self._ids.items()))
        finally:
            await session.close()

    async def _delete(self, session: aiohttp.ClientSession, router: str, name: str) -> None:
        try:
            async with session.delete(f"{router}/workers/{name}") as response:
                if response.status not in (200, 202, 404):
                    raise _RefusedError(f"DELETE /workers/{name}: status {response.status}")
            logger.info("left router %s", router)
        except (aiohttp.ClientError, ConnectionError, TimeoutError, _RefusedError) as error:
            logger.warning("could not leave router %s: %s", router, _said(error))

    async def _keep(self, session: aiohttp.ClientSession, router: str) -> None:
        failures, told = 0, ""
        while True:
            try:
                if router not in self._ids or not await self._is_known(session, router):
                    # Not cancelled half-way: a router that has taken this server in is also told that it leaves.
                    registering = asyncio.create_task(self._register(session, router))
                    self._registering.add(registering)
                    registering.add_done_callback(self._registering.discard)
                    await asyncio.shield(registering)
                failures, told = 0, ""
                wait = self._look_seconds
            except (aiohttp.ClientError, OSError, TimeoutError, _RefusedError) as error:
                said = _said(error)
                if said != told:  # a router that is away for an hour is one line
                    logger.warning("not registered with router %s, trying on: %s", router, said)
                    told = said
                wait = min(_LONGEST_WAIT, _FIRST_WAIT * 2 ** min(failures, 10)) * random.uniform(0.5, 1.0)
                failures += 1
            await asyncio.sleep(wait)

    async def _is_known(self, session: aiohttp.ClientSession, router: str) -> bool:
        async with session.get(f"{router}/workers/{self._ids[router]}") as response:
            if response.status not in (200, 404):
                raise _RefusedError(f"GET /workers: status {response.status}")
            return response.status == 200

    async def _register(self, session: aiohttp.ClientSession, router: str) -> None:
        url = await asyncio.to_thread(advertised_url, self._config, self._port, router)
        async with session.post(f"{router}/workers", json=self._introduction(url)) as response:
            data = await response.read()
            if response.status not in (200, 202):
                raise _RefusedError(f"POST /workers: status {response.status}: {data[:200].decode('utf-8', 'replace')}")
        with contextlib.suppress(msgspec.DecodeError, KeyError, TypeError):
            self._ids[router] = str(msgspec.json.decode(data)["worker_id"])
            logger.info("registered with router %s as %s", router, url)
            return
        raise _RefusedError("POST /workers: the answer has no worker_id")

    def _introduction(self, url: str) -> dict[str, Any]:
        """The body of POST /workers. What it serves beside, and its KV layout, the router asks at /server_info."""
        config = self._config
        labels = {"instance": self._instance, "model_id": config.served_model_name or config.model_path}
        body: dict[str, Any] = {"url": url, "labels": labels}
        if config.disaggregation_mode in ("prefill", "decode"):
            body["worker_type"] = config.disaggregation_mode
        if config.disaggregation_mode == "prefill":
            body["bootstrap_port"] = config.disaggregation_bootstrap_port
        if config.api_key is not None:
            body["api_key"] = config.api_key
        return body


def _said(error: BaseException) -> str:
    return f"{type(error).__name__} {error}" if not isinstance(error, _RefusedError) else str(error)
