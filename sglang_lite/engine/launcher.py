"""Starts an engine core process, watches it and ends it."""

from __future__ import annotations

import asyncio
import logging
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence

import msgspec

from sglang_lite.engine.launch import LaunchMessage
from sglang_lite.engine.watchdog import EXIT_STUCK
from sglang_lite.types import StartupError

logger = logging.getLogger(__name__)

CORE_COMMAND = (sys.executable, "-m", "sglang_lite.engine.process")
"""How a core is started; tests start one with a null executor instead."""


INPUT_END_SECONDS = 1.0
"""How long a core may take to leave after its input has ended."""


def ingress_of(directory: str) -> str:
    """The endpoint that the core in ``directory`` takes commands at."""
    return f"ipc://{directory}/ingress"


def egress_of(directory: str, front: int) -> str:
    """The endpoint at which front number ``front`` hears the core in ``directory``."""
    return f"ipc://{directory}/egress-{front}"


class CoreProcess:
    """One engine core process and the private directory of its sockets.

    Args:
        fronts: front processes that the core answers.

    Attributes:
        directory: mode 0700, removed by ``close`` (or by the core, when the front dies first).
        ingress, egress: ipc endpoints in it.
    """

    def __init__(self, config: str, command: Sequence[str] = CORE_COMMAND, *, fronts: int = 1) -> None:
        self._config = config
        self._command = tuple(command)
        self._process: asyncio.subprocess.Process | None = None
        self._watch: asyncio.Task[None] | None = None
        self.directory = tempfile.mkdtemp(prefix="sglang-lite-")
        self.ingress = ingress_of(self.directory)
        self.egress = tuple(egress_of(self.directory, front) for front in range(fronts))

    async def start(self, on_exit: Callable[[int], None]) -> None:
        """Start the process. ``on_exit`` is called in the event loop with its exit code, as soon as it ends."""
        message = LaunchMessage(config=self._config, directory=self.directory, ingress=self.ingress, egress=self.egress)
        process = await asyncio.create_subprocess_exec(*self._command, stdin=asyncio.subprocess.PIPE)
        self._process = process
        self._watch = asyncio.create_task(self._wait(process, on_exit))
        if process.stdin is None:
            raise StartupError("the engine core was started without an input pipe")
        try:
            process.stdin.write(msgspec.json.encode(message) + b"\n")
            await process.stdin.drain()
        except (BrokenPipeError, ConnectionResetError):
            logger.debug("the core ended before it was told what to do; its exit code says why")

    @property
    def process_id(self) -> int | None:
        """Of the core, None before it was started."""
        return self._process.pid if self._process is not None else None

    async def close(self, grace: float) -> None:
        """Wait up to ``grace`` seconds for the process to end by itself, then end it, and remove the directory."""
        process = self._process
        if process is not None:
            if not await self._ended_within(grace):
                # The end of its input tells the core that the front is gone; it leaves whatever it is doing.
                self._close_input(process)
                if not await self._ended_within(INPUT_END_SECONDS):
                    logger.warning("engine core %d does not end: killing it", process.pid)
                    process.send_signal(signal.SIGKILL)
                    await process.wait()
            self._close_input(process)
        shutil.rmtree(self.directory, ignore_errors=True)

    async def _ended_within(self, seconds: float) -> bool:
        if self._watch is None:
            return True
        done, _ = await asyncio.wait([self._watch], timeout=seconds)
        return bool(done)

    @staticmethod
    def _close_input(process: asyncio.subprocess.Process) -> None:
        if process.stdin is not None:
            process.stdin.close()

    @staticmethod
    async def _wait(process: asyncio.subprocess.Process, on_exit: Callable[[int], None]) -> None:
        on_exit(await process.wait())


def describe_exit(code: int) -> str:
    """Text for an exit code as asyncio reports it: negative for a signal."""
    if code < 0:
        return f"engine core was killed by signal {-code} ({signal.Signals(-code).name})"
    meaning = " because a step did not return in time" if code == EXIT_STUCK else ""
    return f"engine core exited with code {code}{meaning}"
