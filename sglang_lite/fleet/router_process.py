"""A router that the fleet runs beside itself."""

from __future__ import annotations

import asyncio
import logging
import os
import shlex
import socket

from sglang_lite.fleet.router_client import RouterClient
from sglang_lite.fleet.server_process import ROUTER_COMMAND, Launch, ManagedProcess
from sglang_lite.fleet.spec import FleetSpec, flags_of
from sglang_lite.types import StartupError

logger = logging.getLogger(__name__)

_START_SECONDS = 60.0
_LOOK_SECONDS = 0.1
_PAUSE_SECONDS = 1.0
_LEAVE_SECONDS = 10.0


class OwnedRouter:
    """Started before the replicas, started again when it ends, drained before they leave."""

    def __init__(self, spec: FleetSpec, environment: dict[str, str]) -> None:
        self._drain_seconds = spec.drain_seconds
        self._host, self._port = spec.router.host, spec.router.port
        self._command = (*ROUTER_COMMAND, *_words(spec))
        self._launch = Launch(
            name="router",
            environment=environment,
            grace_seconds=spec.drain_seconds + _LEAVE_SECONDS,
            log_directory=spec.log_directory,
        )
        self._process: ManagedProcess | None = None

    async def start(self, client: RouterClient) -> None:
        """Start it and wait for it to answer.

        Raises:
            StartupError: its port is somebody else's, whose answers would be taken for its own, or it ended.
        """
        await asyncio.to_thread(_check_free, self._host, self._port)
        try:
            self._process = await asyncio.to_thread(ManagedProcess, self._command, self._launch)
        except OSError as error:
            raise StartupError(f"the router cannot be started: {error}") from error
        try:
            async with asyncio.timeout(_START_SECONDS):
                while not await client.is_alive():
                    code = self._process.exit_code()
                    if code is not None:
                        raise StartupError(f"the router exited with code {code}; its messages are above or in its log")
                    await asyncio.sleep(_LOOK_SECONDS)
        except TimeoutError:
            raise StartupError(f"the router does not answer after {_START_SECONDS:.0f} s") from None

    async def keep(self, client: RouterClient) -> None:
        """Start it again whenever it ends; runs until cancelled."""
        while True:
            if self._process is None or self._process.exit_code() is None:
                await asyncio.sleep(_PAUSE_SECONDS)
                continue
            logger.warning("the router exited with code %s: starting it again", self._process.exit_code())
            try:
                await self.start(client)
            except StartupError as error:
                logger.warning("%s", error)
                await asyncio.sleep(_PAUSE_SECONDS)

    async def stop(self, at_once: asyncio.Event) -> None:
        """Let it end its requests, not beyond ``at_once``; it is gone afterwards."""
        process = self._process
        if process is None:
            return
        process.drain()
        try:
            async with asyncio.timeout(self._drain_seconds + _LEAVE_SECONDS):
                while process.exit_code() is None and not at_once.is_set():
                    await asyncio.sleep(_LOOK_SECONDS)
        except TimeoutError:
            logger.warning("the router does not end: killing it")
        finally:
            await process.end()


def check_router_flags(spec: FleetSpec) -> None:
    """Raises StartupError for flags of the fleet's router that are wrong, or not the operator's to give."""
    # Imported where it is used: a fleet with a router elsewhere does not need it.
    from sglang_lite.router.options import API_KEY_VARIABLE, parse_options

    if spec.router.url:
        return
    flags = flags_of(spec.router.flags)
    try:
        options = parse_options(_words(spec))
    except SystemExit:
        raise StartupError(f"fleet: router.flags: wrong flags {shlex.join(flags)!r}; see above") from None
    except StartupError as error:
        raise StartupError(f"fleet: router.flags: {error}") from None
    chosen = {"--host": spec.router.host, "--port": spec.router.port}
    for flag, value in chosen.items():
        if getattr(options, flag.removeprefix("--")) != value:
            raise StartupError(f"fleet: router.flags: {flag}: give it as router.{flag.removeprefix('--')}")
    if options.api_key != (os.environ.get(API_KEY_VARIABLE) or None):
        raise StartupError(f"fleet: router.flags: --api-key: give the key in {API_KEY_VARIABLE}")
    refused = {
        "--worker-urls, --prefill, --decode": options.worker_urls or options.prefill or options.decode,
        "--service-discovery": options.service_discovery,
        "--tls-cert-path": options.tls_cert_path,
        "--control-plane-api-keys": options.control_plane_api_keys,
    }
    for flag, value in refused.items():
        if value:
            raise StartupError(f"fleet: router.flags: {flag}: not with the fleet's own router; see docs/fleet.md")


def _words(spec: FleetSpec) -> list[str]:
    """What follows ``router`` on its command line."""
    words = ["--host", spec.router.host, "--port", str(spec.router.port)]
    words += ["--shutdown-grace-period-secs", str(spec.drain_seconds)]
    words += ["--pd-disaggregation"] if spec.has_pairs else []
    return [*words, *flags_of(spec.router.flags)]


def _check_free(host: str, port: int) -> None:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise StartupError(f"router.port {port}: cannot listen on {host}: {error.strerror or error}") from error
