"""The places of a fleet, and what is in them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from sglang_lite.fleet.backend import Replica
from sglang_lite.fleet.server_process import Endpoint
from sglang_lite.fleet.spec import Group, Role


@dataclass(frozen=True, slots=True, eq=False)
class Placed:
    """A replica that serves."""

    name: str
    role: Role
    replica: Replica
    endpoint: Endpoint


@dataclass(slots=True, eq=False)
class Slot:
    """A place for one replica of a group.

    Attributes:
        lock: held by whoever changes ``current``.
        registered: whether the router uses ``current``.
        starts: attempts so far; part of the names of replicas.
    """

    group: Group
    index: int
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    current: Placed | None = None
    registered: bool = False
    starts: int = 0

    @property
    def title(self) -> str:
        """Of the place."""
        return f"{self.group.title}-{self.index}"
