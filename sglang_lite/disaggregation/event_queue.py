"""Events on their way from a session worker to the core."""

from __future__ import annotations

import collections
import contextlib
import socket
from typing import Generic, TypeVar

Item = TypeVar("Item")


class EventQueue(Generic[Item]):
    """Any thread puts, one takes; a descriptor is readable while events wait."""

    def __init__(self) -> None:
        self._events: collections.deque[Item] = collections.deque()
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def put(self, event: Item) -> None:
        """Add one."""
        self._events.append(event)
        with contextlib.suppress(BlockingIOError):  # then the descriptor is readable already
            self._writer.send(b"\0")

    def take(self) -> list[Item]:
        """All that wait, in order."""
        try:
            while self._reader.recv(4096):
                pass
        except BlockingIOError:
            pass
        taken = []
        while self._events:
            taken.append(self._events.popleft())
        return taken

    def fileno(self) -> int:
        """The descriptor."""
        return self._reader.fileno()

    def close(self) -> None:
        """Nobody puts or takes any more."""
        self._reader.close()
        self._writer.close()
