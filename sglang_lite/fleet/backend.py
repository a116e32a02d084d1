"""Where replicas run."""

from __future__ import annotations

from typing import Protocol

from sglang_lite.fleet.server_process import Endpoint, Launch
from sglang_lite.fleet.spec import Resources


class ReplicaError(Exception):
    """A replica cannot be started, or its owner is gone. ``final`` when trying again cannot help."""

    def __init__(self, reason: str, *, final: bool = False) -> None:
        super().__init__(reason)
        self.final = final


class Replica(Protocol):
    """One placed replica. No method waits for its server, only for the machine that it is on."""

    async def start(self) -> Endpoint:
        """Start the server; waits until there is room for it.

        Raises:
            ReplicaError: its owner cannot be had, or is gone.
        """

    async def exit_code(self) -> int | None:
        """None while the server runs.

        Raises:
            ReplicaError: its owner is gone.
        """

    async def drain(self) -> None:
        """Ask the server to let its requests end and to leave.

        Raises:
            ReplicaError: its owner is gone.
        """

    async def kill(self) -> None:
        """End the server and give its place back; also before ``start`` has returned."""


class Backend(Protocol):
    """A place for replicas."""

    async def open(self) -> None:
        """Connect.

        Raises:
            StartupError: the place cannot be reached.
        """

    def place(self, launch: Launch, resources: Resources) -> Replica:
        """A replica with these resources, not started yet."""

    async def close(self) -> None:
        """Disconnect; the replicas are closed by then."""
