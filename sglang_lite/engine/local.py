"""Transport within one process: the offline engine hands commands to the core and takes rows without any socket."""

from __future__ import annotations

import contextlib
import select
import threading
from collections.abc import Callable

from sglang_lite.disaggregation.event_queue import EventQueue
from sglang_lite.engine.frames import Command, ControlEvent
from sglang_lite.types import OutputColumns


class LocalTransport:
    """Commands in a list, results through callbacks in the thread that steps the core.

    Args:
        on_output: gets the rows of each step.
        on_event: gets replies and load reports.
    """

    def __init__(self, on_output: Callable[[OutputColumns], None], on_event: Callable[[ControlEvent], None]) -> None:
        self._on_output = on_output
        self._on_event = on_event
        self._commands: list[Command] = []
        self._arrived = threading.Condition()

    def put(self, command: Command) -> None:
        """Queue a command and wake the core; any thread may call this."""
        with self._arrived:
            self._commands.append(command)
            self._arrived.notify_all()

    def receive(self, timeout: float | None) -> list[Command]:
        """See ``Transport.receive``."""
        with self._arrived:
            if not self._commands and timeout != 0:
                self._arrived.wait(None if timeout is None else min(timeout, threading.TIMEOUT_MAX))
            commands, self._commands = self._commands, []
        return commands

    def send_output(self, columns: OutputColumns) -> None:
        """See ``Transport.send_output``."""
        self._on_output(columns)

    def send(self, event: ControlEvent, front: int | None = None) -> None:
        """See ``Transport.send``; there is only one front."""
        self._on_event(event)


class WatchingTransport(LocalTransport):
    """One whose waits end as well when something else has happened.

    Args:
        watched: a descriptor that is readable then.
    """

    def __init__(
        self,
        on_output: Callable[[OutputColumns], None],
        on_event: Callable[[ControlEvent], None],
        watched: int,
    ) -> None:
        super().__init__(on_output, on_event)
        self._queue: EventQueue[Command] = EventQueue()
        self._poller = select.poll()
        for readable in (watched, self._queue.fileno()):
            self._poller.register(readable, select.POLLIN)

    def put(self, command: Command) -> None:
        """See ``LocalTransport.put``."""
        with contextlib.suppress(OSError):  # it was closed: nobody would take it
            self._queue.put(command)

    def receive(self, timeout: float | None) -> list[Command]:
        """See ``Transport.receive``."""
        if timeout != 0:
            self._poller.poll(None if timeout is None else timeout * 1000)
        return self._queue.take()

    def close(self) -> None:
        """Nobody receives any more."""
        self._queue.close()
