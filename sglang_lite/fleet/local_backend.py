"""Replicas as processes on this machine."""

from __future__ import annotations

import asyncio

from sglang_lite.fleet.backend import ReplicaError
from sglang_lite.fleet.server_process import Endpoint, Launch, ServerProcess
from sglang_lite.fleet.spec import Resources

ADDRESS = "127.0.0.1"


class LocalReplica:
    """A replica that is a child of this process."""

    def __init__(self, launch: Launch) -> None:
        self._server = ServerProcess(launch, ADDRESS)

    async def start(self) -> Endpoint:
        """See ``Replica``."""
        try:
            return await asyncio.to_thread(self._server.start)
        except OSError as error:
            raise ReplicaError(f"it cannot be started: {error}") from error

    async def exit_code(self) -> int | None:
        """See ``Replica``."""
        return self._server.exit_code()

    async def drain(self) -> None:
        """See ``Replica``."""
        self._server.drain()

    async def kill(self) -> None:
        """See ``Replica``."""
        if self._server.process is not None:
            await self._server.process.end()


class LocalBackend:
    """This machine. Resources are not counted here; the operator gives no more replicas than fit."""

    async def open(self) -> None:
        """See ``Backend``."""

    def place(self, launch: Launch, resources: Resources) -> LocalReplica:
        """See ``Backend``."""
        return LocalReplica(launch)

    async def close(self) -> None:
        """See ``Backend``."""
