"""Asks the bootstrap servers that a decode worker knows whether they are there, every few seconds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from sglang_lite.disaggregation.bootstrap_client import BootstrapClient
from sglang_lite.disaggregation.options import SessionOptions
from sglang_lite.disaggregation.prefill_directory import PrefillDirectory, PrefillServer

Lost = Callable[[PrefillServer, str], None]
"""Takes a server and why it counts as lost."""


class ServerWatch:
    """A server that fails too often, or is another process by now, is forgotten and told."""

    def __init__(
        self, client: BootstrapClient, directory: PrefillDirectory, options: SessionOptions, on_lost: Lost
    ) -> None:
        self._client, self._directory, self._options, self._on_lost = client, directory, options, on_lost

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            await asyncio.sleep(self._options.heartbeat_interval)
            await asyncio.gather(*(self._check(server) for server in self._directory.servers()))

    async def _check(self, server: PrefillServer) -> None:
        instance = await self._client.health(server.host, server.port)
        if instance is not None and server.health_instance in (None, instance):
            server.health_failures, server.health_instance = 0, instance
            self._directory.note_alive(server.host, server.port)
            return
        server.health_failures += 1
        is_replaced = instance is not None
        if not is_replaced:
            self._directory.note_gone(server.host, server.port)
        if is_replaced or server.health_failures >= self._options.heartbeat_max_failure:
            self._directory.forget(server.host, server.port)
            why = "another process has its address now" if is_replaced else "its bootstrap server does not answer"
            self._on_lost(server, why)
