"""Further front processes of a server (``--tokenizer-worker-num``): starting, telling and ending them."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Mapping, Sequence

import msgspec

from sglang_lite.engine.info import EngineInfo
from sglang_lite.types import StartupError

logger = logging.getLogger(__name__)

FRONT_COMMAND = (sys.executable, "-m", "sglang_lite.server.front_process")
READY = b"ready\n"
DRAIN = b"drain\n"
LOST = b"lost "
"""Followed by why."""
LOST_REPLICA = b"lost-replica "
"""Followed by a number, a blank and why."""
START_SECONDS = 120.0
END_SECONDS = 5.0
"""How long a front may take to leave once nothing holds it."""


class FrontMessage(msgspec.Struct, frozen=True, kw_only=True):
    """What a further front needs to serve: one line of JSON on its standard input.

    After it come lines: ``lost-replica NUMBER WHY`` says that one of several cores is gone, ``drain`` asks to finish
    what runs and leave, ``lost WHY`` says that the server ends because the engine core or another front is gone. The
    end of the input means that the first front is gone: leave at once.
    """

    config: str
    info: EngineInfo
    directories: list[str]
    front: int
    port: int
    launch_command: str


class FrontWorkers:
    """The processes that the first front has started."""

    def __init__(self) -> None:
        self._processes: list[asyncio.subprocess.Process] = []
        self._ending = False
        self._told: set[int] = set()

    async def start(self, messages: Sequence[FrontMessage]) -> None:
        """Start one process a message and wait until all serve.

        Raises:
            StartupError: one of them does not.
        """
        for message in messages:
            pipe = asyncio.subprocess.PIPE
            process = await asyncio.create_subprocess_exec(*FRONT_COMMAND, stdin=pipe, stdout=pipe)
            self._processes.append(process)
            self._tell(process, msgspec.json.encode(message) + b"\n")
        try:
            async with asyncio.timeout(START_SECONDS):
                lines = await asyncio.gather(*(_first_line(process) for process in self._processes))
        except TimeoutError:
            raise StartupError(f"a front process was not ready within {START_SECONDS:g} s") from None
        for process, line in zip(self._processes, lines, strict=True):
            if line != READY:
                raise StartupError(f"front process {process.pid} ended before it was ready; its messages say why")

    @property
    def dead(self) -> int | None:
        """Process id of a front that has ended on its own, None while all live."""
        if self._ending:
            return None
        return next((process.pid for process in self._processes if process.returncode is not None), None)

    def drain(self) -> None:
        """Ask them to finish what runs and leave."""
        self._ending = True
        for process in self._processes:
            self._tell(process, DRAIN)

    def lose_server(self, reason: str) -> None:
        """Tell them why the server ends at once."""
        self._ending = True
        for process in self._processes:
            self._tell(process, LOST + f"{' '.join(reason.split())}\n".encode())

    def lose_replicas(self, lost: Mapping[int, str]) -> None:
        """Tell them, once, which of several cores are gone, and why."""
        for replica in lost.keys() - self._told:
            self._told.add(replica)
            reason = " ".join(lost[replica].split())
            for process in self._processes:
                self._tell(process, LOST_REPLICA + f"{replica} {reason}\n".encode())

    async def wait(self) -> None:
        """Return when all have ended."""
        await asyncio.gather(*(process.wait() for process in self._processes))

    async def close(self) -> None:
        """End them: they leave when their input ends, or are killed."""
        self._ending = True
        for process in self._processes:
            if process.stdin is not None:
                process.stdin.close()
        try:
            async with asyncio.timeout(END_SECONDS):
                await self.wait()
        except TimeoutError:
            for process in self._processes:
                if process.returncode is None:
                    logger.warning("front process %d does not end: killing it", process.pid)
                    process.kill()
            await self.wait()

    @staticmethod
    def _tell(process: asyncio.subprocess.Process, line: bytes) -> None:
        if process.stdin is not None and not process.stdin.is_closing():
            process.stdin.write(line)


async def _first_line(process: asyncio.subprocess.Process) -> bytes:
    return b"" if process.stdout is None else await process.stdout.readline()
