"""A router that the fleet runs beside itself."""

from __future__ import annotations

import asyncio
import logging

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
        words = ["--host", spec.router.host, "--port", str(spec.router.port)]
        words += ["--shutdown-grace-period-secs", str(spec.drain_seconds)]
        words += ["--pd-disaggregation"] if spec.has_pairs else []
        self._command = (*ROUTER_COMMAND, *words, *flags_of(spec.router.flags))
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
            StartupError: it ended instead.
        """
        self._process = await asyncio.to_thread(ManagedProcess, self._command, self._launch)
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
